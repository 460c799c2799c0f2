"""Saturating: sums of integers in a few bits (THC's all-reduce; UTIL 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import clamp, concat, isfinite, map, uint, where

# Floats from here to 2^24 are integers, so adding this number rounds to nearest, ties to even.
_ROUNDING = 1.5 * 2**23


@dataclass(frozen=True)
class Saturating(Codec):
    """Signed integers of `bits` bits; values outside their range saturate.

    Options:
        bits: of a code, 2 to 8: the range is -(2^(bits - 1) - 1) to 2^(bits - 1) - 1.

    Values should be integers already; others are rounded to nearest, ties to even, and not scaled.
    A merge adds exactly, since fp32 holds integers up to 2^24, and saturates its result. A sum that
    saturates therefore depends on the algorithm's order of additions: it saturates once if one rank
    adds all payloads (sra), and at every hop if partial sums are sent (ring). The last code marks a
    non-finite value and decodes to NaN.
    """

    bits: int = 4

    def __post_init__(self) -> None:
        checks.integer(self, "bits", 2, 8)

    def encode(self, g: Value) -> Payload:
        def code(v: Value) -> Value:
            whole = clamp(v, -self.most, self.most) + _ROUNDING - _ROUNDING
            return where(isfinite(v), whole + self.most, 2 * self.most + 1)

        return concat(code=uint(self.bits, map(code, g)))

    def decode(self, code: Value) -> Value:
        nan = float("nan")
        return map(lambda c: where(c > 2.0 * self.most, nan, c - self.most), code)

    @property
    def most(self) -> int:
        """The largest number."""
        return int(2 ** (self.bits - 1)) - 1
