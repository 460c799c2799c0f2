"""Identity: the values as they are. The baseline, and the road that dense parameters take."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import concat, native


@dataclass(frozen=True)
class Identity(Codec):
    """Values in their own dtype, bit for bit but for NaN, of which one kind is sent."""

    def encode(self, g: Value) -> Payload:
        return concat(value=native(g))

    def decode(self, value: Value) -> Value:
        return value
