"""Float8: values in blocks as 8-bit floats, a scale per block (OCP E4M3)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import abs, concat, fp8, fp32, inverse, map, reduce, where

_LARGEST = 448.0
_LEAST = 2.0**-126  # of scales: below, a float has fewer bits


@dataclass(frozen=True)
class Float8(Codec):
    """Values as E4M3 floats, rounded to nearest even, times a scale per block.

    Options:
        block: values that share a scale, 1 to 65536.

    The scale is the block's largest magnitude / 448, the largest E4M3 float, and at least 2^-126.
    So a value's error is at most 1/16 of it, or 2^-10 scales, about 2e-6 of the block's largest
    magnitude, if that is more: an error relative to the value, where grids have one relative to
    their block. Nothing is drawn. Zeros decode to zeros; a block with a non-finite value to
    non-finite values.
    """

    block: int = 1024

    contracts = True  # no error exceeds its value

    def __post_init__(self) -> None:
        checks.integer(self, "block", 1, checks.MAX_BLOCK)

    def encode(self, g: Value) -> Payload:
        x = g.blocks(self.block)
        share = reduce(max, map(abs, x)) / _LARGEST
        scale = fp32(where(share < _LEAST, _LEAST, share))  # NaN stays
        return concat(scale=scale, value=fp8(map(lambda v: v * inverse(scale), x)))

    def decode(self, scale: Value, value: Value) -> Value:
        return map(lambda v: v * scale, value)
