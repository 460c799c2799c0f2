"""The codec language: codecs are traced, lowered to sweeps over memory, and run on a target.

Read in this order: ops (what a codec's file imports), ir, trace, forms (the derived kernels),
passes, emit/c. eager and semantics define the meaning of every operation.
"""

from __future__ import annotations

from gradwire.lang.codec import Codec
from gradwire.lang.exact import Exact
from gradwire.lang.layout import Layout, layout
from gradwire.lang.show import fingerprint, show
from gradwire.lang.source import LanguageError
from gradwire.lang.trace import Payload, Value

try:
    from gradwire.lang import contraction, rng
    from gradwire.lang.call import ROW, Kernels
    from gradwire.lang.kernels import decode, encode, kernels
    from gradwire.lang.series import KernelCall, Series
except ModuleNotFoundError as missing:
    # Wheels are built without torch: codecs compile there, but do not run. Attributes are not lazy,
    # because `kernels` is a function and a module, and the last import would decide which.
    if missing.name not in ("torch", "numpy"):
        raise

__all__ = [
    "ROW", "Codec", "Exact", "KernelCall", "Kernels", "LanguageError", "Layout", "Payload",
    "Series", "Value", "contraction", "decode", "encode", "fingerprint", "kernels", "layout", "rng",
    "show",
]  # fmt: skip
