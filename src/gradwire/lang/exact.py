"""Uncompressed values of any dtype: nothing is traced, and torch does the reductions.

Codecs in the language only sum, and only fp32, fp16 and bf16 values. Collectives of integers,
float64 or complex numbers, minima, maxima, and copies of any tensor use `Exact` instead of a codec,
so they are cut, laid out and sent like all others. It is internal: it has no name in
`codecs.REGISTRY`. exact_forms.py runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradwire.errors import ConfigError
from gradwire.lang import ir
from gradwire.lang.codec import Codec

if TYPE_CHECKING:  # sources are also generated without torch
    import torch

# the language's dtype names -> torch's
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
    """The bits of the values; their sum, minimum or maximum over the ranks.

    Options:
        op: "sum", "min" or "max", or "" for copies, which may have any dtype.

    Sums of integers wrap. Sums of fp16 and bf16 are rounded at every addition, as in torch;
    `Identity` rounds once. Minima and maxima propagate NaN. A reduction returns the canonical NaN,
    and a minimum or maximum returns +0 for either zero: torch's choice depends on the CPU, and
    ranks must agree. A copy changes no bit.
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
        """Bytes per value of `dtype`, given as a torch.dtype or by its name in the language.

        Raises:
            ConfigError: `op` is not defined for it, or it is a dtype of quantised tensors.
        """
        name = torch_name(dtype)
        if self.op and name not in REDUCED[self.op]:
            raise ConfigError(
                f"Exact: op={self.op!r} is not defined for {name} values, only for "
                f"{', '.join(REDUCED[self.op])}"
            )
        if isinstance(dtype, str):
            return ir.BITS[dtype] // 8
        if name.startswith("q"):
            raise ConfigError(f"Exact: {name} values mean nothing without their scale")
        return dtype.itemsize


def torch_name(dtype: torch.dtype | str) -> str:
    """torch's name of a dtype or of a name in the language. `ConfigError` for any other string."""
    if not isinstance(dtype, str):
        return str(dtype).removeprefix("torch.")
    if dtype not in _TORCH_NAMES:
        raise ConfigError(
            f"values of {dtype!r}: use a torch.dtype, or one of {', '.join(_TORCH_NAMES)}"
        )
    return _TORCH_NAMES[dtype]
