"""Identity: uncompressed values. The baseline, and the codec of uncompressed parameters."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import concat, native


@dataclass(frozen=True)
class Identity(Codec):
    """Values in their own dtype, bit for bit, except that every NaN becomes the canonical NaN."""

    def encode(self, g: Value) -> Payload:
        return concat(value=native(g))

    def decode(self, value: Value) -> Value:
        return value
