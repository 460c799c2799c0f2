"""OneBit: the sign of every value, two means per block (THESIS 2.2.3, HIPRESS; Seide 2014)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import concat, count, inverse, map, reduce, uint, where


@dataclass(frozen=True)
class OneBit(Codec):
    """One bit per value: it decodes to the mean of its block's values of the same sign.

    Options:
        block: values that share two means, 1 to 65536; None: all values.

    Zero counts as positive. Biased, so it needs error feedback. Values are divided by their count
    before they are summed, so the sum does not overflow. A non-finite value makes both means
    of its block non-finite.
    """

    block: int | None = 1024

    def __post_init__(self) -> None:
        if self.block is not None:
            checks.integer(self, "block", 1, checks.MAX_BLOCK)

    def encode(self, g: Value) -> Payload:
        x = g if self.block is None else g.blocks(self.block)
        share, rest = inverse(count(x >= 0.0)), inverse(count(x < 0.0))
        high = reduce(sum, map(lambda v: where(v >= 0.0, v * share, 0.0), x))
        low = reduce(sum, map(lambda v: where(v >= 0.0, 0.0, v * rest), x))
        # 0, or NaN if one of the means is not finite
        bad = (high - high) + (low - low)
        return concat(low=low + bad, high=high + bad, code=uint(1, x >= 0.0))

    def decode(self, low: Value, high: Value, code: Value) -> Value:
        return map(lambda positive: where(positive > 0.0, high, low), code)
