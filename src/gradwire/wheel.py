"""The prebuilt code of a wheel: the codecs' kernels and the shared-memory transport.

This imports neither torch nor numpy: wheels are built without them.
"""

from __future__ import annotations

from collections.abc import Iterable

from gradwire.codecs import variants
from gradwire.lang.native import build
from gradwire.transport import shm_library

SHM = "shm"


def units(chosen: Iterable[str] | None = None) -> list[build.Unit]:
    """All units, or the chosen ones: codecs, as `variants.prebuilt` takes them, and "shm".

    Raises `ConfigError` for an unknown name.
    """
    names = None if chosen is None else list(chosen)
    codecs = None if names is None else [name for name in names if name != SHM]
    found = build.units(variants.prebuilt(codecs))
    if names is None or SHM in names:
        found.append(build.Unit(SHM, shm_library.source(), shm_library.SIGNATURES))
    return found
