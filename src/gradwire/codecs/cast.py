"""Cast: every value rounded to 16 bits, as torch's fp16 and bf16 hooks do."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import bf16, concat, fp16


@dataclass(frozen=True)
class Cast(Codec):
    """Values as fp16 or bf16, rounded to nearest even.

    Options:
        dtype: "fp16" or "bf16".

    As with torch's hook, a gradient from 65520 on becomes Inf in fp16, on all ranks, so that a
    GradScaler skips the step and lowers its scale; and one of at most 2^-25, about 3e-8, becomes 0.
    With error feedback the residual keeps what is rounded off, and what fp16 cannot hold because of
    the residual itself: it follows in later steps. bf16 has the range of fp32; it saturates.
    """

    dtype: str = "fp16"

    def __post_init__(self) -> None:
        checks.one_of(self, "dtype", ("fp16", "bf16"))

    def encode(self, g: Value) -> Payload:
        return concat(value=fp16(g) if self.dtype == "fp16" else bf16(g))

    def decode(self, value: Value) -> Value:
        return value
