"""The codecs that a wheel contains prebuilt: every registered one, and common options of some.

Other combinations of options are compiled on first use, which needs a compiler.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradwire import codecs
from gradwire.codecs import Codec

# name -> further sets of options, besides the defaults
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "qsgd": [
        *({"bits": bits} for bits in (1, 2, 3, 5, 6, 7, 8)),
        *({"bits": bits, "rounding": "stochastic"} for bits in (2, 4, 8)),
        *({"bits": bits, "block": 1024} for bits in (4, 8)),
        *({"bits": bits, "scale": scale} for bits in (4, 8) for scale in ("max", "l2")),
    ],
    "topk": [{"density": 0.001}, {"density": 0.1}],
    "terngrad": [{"form": "ternary"}],
}


def prebuilt(chosen: Iterable[str] | None = None) -> list[tuple[str, Codec]]:
    """(label, codec) of everything that a wheel contains, or of the chosen codecs.

    A label is NAME or NAME:OPTION=VALUE:..., as `gradwire codec show` takes it. A NAME also chooses
    its entries in `VARIANTS`; a label with options chooses that one codec, listed there or not.
    Raises `ConfigError` for an unknown name or option.
    """
    labels: list[str] = []
    for one in codecs.REGISTRY if chosen is None else chosen:
        labels.append(one)
        for options in VARIANTS.get(one, []):
            labels.append(":".join([one, *(f"{key}={value}" for key, value in options.items())]))
    return [(label, codecs.get(label)) for label in labels]
