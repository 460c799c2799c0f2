"""Which codecs a wheel carries compiled: every registered one as it is, and common options.

Any other combination of options is compiled on first use, where there is a compiler.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradwire import codecs
from gradwire.codecs import Codec
from gradwire.errors import ConfigError

# codec's name -> options beside its defaults
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "qsgd": [
        *({"bits": bits} for bits in (1, 2, 3, 5, 6, 7, 8)),
        *({"bits": bits, "block": 1024} for bits in (2, 4, 8)),
        *({"bits": bits, "scale": scale} for bits in (2, 4, 8) for scale in ("max", "l2")),
    ],
    "terngrad": [{"form": "ternary"}],
}


def prebuilt(names: Iterable[str] | None = None) -> list[tuple[str, Codec]]:
    """(label, codec) of all that a wheel carries, or of those with the given names.

    A label is what `gradwire codec show` takes: NAME:OPTION=VALUE:... Raises `ConfigError` for an
    unknown name.
    """
    chosen = list(codecs.REGISTRY if names is None else names)
    for name in chosen:
        if name not in codecs.REGISTRY:
            known = ", ".join(codecs.REGISTRY)
            raise ConfigError(f"unknown codec {name!r}: use one of {known}")
    return [
        (":".join([name, *(f"{key}={value}" for key, value in options.items())]), made)
        for name in chosen
        for options in [{}, *VARIANTS.get(name, [])]
        for made in [codecs.get(name, **options)]
    ]
