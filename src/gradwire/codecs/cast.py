"""Cast: every value rounded to 16 bits, as torch's fp16 and bf16 hooks do."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import bf16, concat, fp16


@dataclass(frozen=True)
class Cast(Codec):
    """Values as fp16 or bf16, rounded to nearest even. Saturates: only infinities become infinite.

    Options:
        dtype: "fp16" or "bf16".
    """

    dtype: str = "fp16"

    def __post_init__(self) -> None:
        checks.one_of(self, "dtype", ("fp16", "bf16"))

    def encode(self, g: Value) -> Payload:
        return concat(value=fp16(g) if self.dtype == "fp16" else bf16(g))

    def decode(self, value: Value) -> Value:
        return value
