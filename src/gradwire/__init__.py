"""gradwire: compressed communication for PyTorch training on slow networks.

import gradwire as gw
model = DistributedDataParallel(model)
gw.attach(model, codec="qsgd", bits=4)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gradwire.errors import CodecError, ConfigError, GradwireError, TransportError

if TYPE_CHECKING:
    from gradwire.codecs import QSGD, Cast, Identity, TernGrad
    from gradwire.collectives import Options, all_gather, all_reduce, broadcast, reduce_scatter
    from gradwire.integrations.attach import attach
    from gradwire.integrations.backend_register import register
    from gradwire.integrations.handle import Handle
    from gradwire.lang import Codec

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
    "broadcast",
    "reduce_scatter",
    "register",
]

# What needs torch is imported when it is asked for: where wheels are built there is none. And
# `import torch` imports this package (integrations/backend_entry.py), which must cost it nothing.
_LATER = {
    "QSGD": "gradwire.codecs",
    "Cast": "gradwire.codecs",
    "Codec": "gradwire.lang",
    "Identity": "gradwire.codecs",
    "TernGrad": "gradwire.codecs",
    "Options": "gradwire.collectives",
    "all_gather": "gradwire.collectives",
    "all_reduce": "gradwire.collectives",
    "broadcast": "gradwire.collectives",
    "reduce_scatter": "gradwire.collectives",
    "Handle": "gradwire.integrations.handle",
    "attach": "gradwire.integrations.attach",
    "register": "gradwire.integrations.backend_register",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
