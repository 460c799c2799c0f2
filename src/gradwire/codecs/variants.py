"""Which codecs a wheel carries compiled: every registered one as it is, and common options.

Any other combination of options is compiled on first use, where there is a compiler.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradwire import codecs
from gradwire.codecs import Codec

# name -> options of further rows, besides the codec as it is
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "qsgd": [
        *({"bits": bits} for bits in (1, 2, 3, 5, 6, 7, 8)),
        *({"bits": bits, "block": 1024} for bits in (4, 8)),
        *({"bits": bits, "scale": scale} for bits in (4, 8) for scale in ("max", "l2")),
    ],
    "topk": [{"density": 0.001}, {"density": 0.1}],
    "terngrad": [{"form": "ternary"}],
}


def prebuilt(chosen: Iterable[str] | None = None) -> list[tuple[str, Codec]]:
    """(label, codec) of all that a wheel carries, or of what is chosen.

    A label is NAME or NAME:OPTION=VALUE:..., as `gradwire codec show` takes it. Choosing a NAME
    chooses all of its rows in `VARIANTS`; a label with options stands for that one codec, whether
    it has a row or not. Raises `ConfigError` for an unknown name or option.
    """
    labels: list[str] = []
    for one in codecs.REGISTRY if chosen is None else chosen:
        labels.append(one)
        for options in VARIANTS.get(one, []):
            labels.append(":".join([one, *(f"{key}={value}" for key, value in options.items())]))
    return [(label, codecs.get(label)) for label in labels]
