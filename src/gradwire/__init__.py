"""gradwire: compressed communication for PyTorch training on slow networks.

import gradwire as gw
model = DistributedDataParallel(model)
gw.attach(model, codec="qsgd", bits=4)
"""

from gradwire.codecs import QSGD, Cast, Identity, TernGrad
from gradwire.collectives import Options, all_reduce
from gradwire.errors import CodecError, ConfigError, GradwireError, TransportError
from gradwire.integrations import Handle, attach
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
    "all_reduce",
    "attach",
]
