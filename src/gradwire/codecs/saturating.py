"""Saturating: sums of whole numbers in a few bits (THC's all-reduce; UTIL 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import clamp, concat, isfinite, map, uint, where

_WHOLE = 1.5 * 2**23  # from here to 2^24 floats are whole numbers: adding it rounds, ties to even


@dataclass(frozen=True)
class Saturating(Codec):
    """Whole numbers of `bits` bits, with their sign; what lies outside saturates.

    Options:
        bits: of a code, 2 to 8: the largest number is 2^(bits - 1) - 1, and the smallest minus it.

    For values that are whole numbers already: any others are rounded to the nearest, ties to even,
    without regard to their size. A merge adds exactly, since fp32 holds whole numbers to 2^24, and
    saturates what it writes. So a sum that saturates depends on the order of additions, which is
    the algorithm's: where one rank adds all payloads (sra) it saturates once, where partial sums
    travel (ring) at every hop. The last code stands for a value that is not finite, and decodes to
    NaN.
    """

    bits: int = 4

    def __post_init__(self) -> None:
        checks.whole(self, "bits", 2, 8)

    def encode(self, g: Value) -> Payload:
        def code(v: Value) -> Value:
            whole = clamp(v, -self.most, self.most) + _WHOLE - _WHOLE
            return where(isfinite(v), whole + self.most, 2 * self.most + 1)

        return concat(code=uint(self.bits, map(code, g)))

    def decode(self, code: Value) -> Value:
        nan = float("nan")
        return map(lambda c: where(c > 2.0 * self.most, nan, c - self.most), code)

    @property
    def most(self) -> int:
        """The largest number."""
        return int(2 ** (self.bits - 1)) - 1
