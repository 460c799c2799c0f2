"""Values of any dtype as they are: no codec is traced, and what is reduced, torch reduces.

Codecs in the language know fp32, fp16 and bf16, and sum. A collective of integers, of float64 or of
complex numbers, a minimum, and a copy of any tensor have `Exact` in a codec's place, so that they
are cut, laid out and moved as all others. It is no user's codec: `codecs.REGISTRY` has no name for
it. exact_forms.py runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradwire.errors import ConfigError
from gradwire.lang import ir
from gradwire.lang.codec import Codec

if TYPE_CHECKING:  # sources are generated where there is none
    import torch

# the language's names of dtypes, by which `layout` also takes them
_TORCH_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
REDUCED = {
    "sum": (*_INTEGERS, *_FLOATS, "complex64", "complex128"),
    "min": ("bool", *_INTEGERS, *_FLOATS),
    "max": ("bool", *_INTEGERS, *_FLOATS),
}


@dataclass(frozen=True)
class Exact(Codec):
    """The bits of the values, one after the other; their sum, minimum or maximum over ranks.

    Options:
        op: "sum", "min" or "max", or "" for what is only copied, which may have any dtype.

    Sums of integers wrap. A sum of fp16 or bf16 values is rounded at every addition, as torch's;
    `Identity` rounds it once. Minima and maxima are NaN where a value is. A reduction gives one
    kind of NaN, and a minimum or maximum +0 for either zero: which of them torch gives depends on
    the CPU, and ranks must agree. A copy changes no bit.
    """

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in (*REDUCED, ""):
            raise ConfigError(f"Exact: op={self.op!r} must be 'sum', 'min', 'max' or ''")

    @property
    def biased(self) -> bool:
        """Values as they are."""
        return False

    def itemsize(self, dtype: torch.dtype | str) -> int:
        """Bytes of a value of `dtype`: torch's, or the language's name of one.

        Raises:
            ConfigError: `op` is not defined for it, or it is one of quantised tensors.
        """
        name = torch_name(dtype)
        if self.op and name not in REDUCED[self.op]:
            raise ConfigError(
                f"Exact: op={self.op!r} is not defined for {name} values; it is for "
                f"{', '.join(REDUCED[self.op])}"
            )
        if isinstance(dtype, str):
            return ir.BITS[dtype] // 8
        if name.startswith("q"):
            raise ConfigError(f"Exact: {name} values mean nothing without their scale")
        return dtype.itemsize


def torch_name(dtype: torch.dtype | str) -> str:
    """torch's name of a dtype, for the language's name too. `ConfigError` for any other string."""
    if not isinstance(dtype, str):
        return str(dtype).removeprefix("torch.")
    if dtype not in _TORCH_NAMES:
        raise ConfigError(
            f"values of {dtype!r}: use a torch.dtype, or one of {', '.join(_TORCH_NAMES)}"
        )
    return _TORCH_NAMES[dtype]
