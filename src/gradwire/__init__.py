"""gradwire: compressed communication for PyTorch training on slow networks.

import gradwire as gw
model = DistributedDataParallel(model)
gw.attach(model, codec="qsgd", bits=4)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gradwire.codecs import QSGD, Cast, Identity, TernGrad
from gradwire.errors import CodecError, ConfigError, GradwireError, TransportError
from gradwire.lang import Codec

if TYPE_CHECKING:
    from gradwire.collectives import Options, all_gather, all_reduce, reduce_scatter
    from gradwire.integrations.attach import Handle, attach

__version__ = "0.1.0"

__all__ = [
    "QSGD",
    "Cast",
    "Codec",
    "CodecError",
    "ConfigError",
    "GradwireError",
    "Handle",
    "Identity",
    "Options",
    "TernGrad",
    "TransportError",
    "all_gather",
    "all_reduce",
    "attach",
    "reduce_scatter",
]

# What needs torch is imported when it is asked for: where wheels are built there is none.
_LATER = {
    "Options": "gradwire.collectives",
    "all_gather": "gradwire.collectives",
    "all_reduce": "gradwire.collectives",
    "reduce_scatter": "gradwire.collectives",
    "Handle": "gradwire.integrations.attach",
    "attach": "gradwire.integrations.attach",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
