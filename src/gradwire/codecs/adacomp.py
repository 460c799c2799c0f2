"""AdaComp: values near the maximum of their bin (HIPRESS 4.4; Chen 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import (
    abs,
    concat,
    count,
    gather,
    inverse,
    reduce,
    scatter,
    share,
    topk,
    uint,
    where,
)

MAX_BIN = 32768  # the largest block of a codec with a selection

# Expected entries per bin: BASE_ENTRIES + ENTRIES_PER_DOUBLING * log2(bin size). Within 10 % of
# what Gaussian gradients give in bins of 50 to 8192, once residuals have built up.
BASE_ENTRIES, ENTRIES_PER_DOUBLING = 1.0, 0.62


@dataclass(frozen=True)
class AdaComp(Codec):
    """The signs of a few values per bin, all decoded to one magnitude; needs error feedback.

    Options:
        block: values in a bin, 1 to 32768. The paper takes 50 for convolutions, 500 for the rest.
        density: the fraction of the values that a payload has room for, above 0 and at most 1.

    Let x be the gradient g plus the residual. The sign of x is sent if |x + g| reaches the largest
    |x| of its bin, so the number of values sent depends on the data: 1 to 3 % of Gaussian gradients
    once residuals have built up, 11 % in the first step. If more values qualify than there is room
    for, the largest are sent. The magnitude is the mean of the largest |x| per bin, over non-zero
    bins. One non-finite value makes everything that is sent non-finite.
    """

    block: int = 512
    density: float = 0.05

    contracts = True  # an error may exceed its value, but not the largest, and the largest are sent

    def __post_init__(self) -> None:
        checks.integer(self, "block", 1, MAX_BIN)
        checks.number(self, "density", above=0, most=1)

    def encode(self, g: Value, latest: Value | None = None) -> Payload:
        top = reduce(max, abs(g.blocks(self.block)))
        scale = reduce(sum, top) * inverse(count(top > 0.0))
        ahead = g + (g if latest is None else latest)
        # negated, so that the condition holds where `top` is NaN
        chosen = topk(abs(ahead), share(self.density), among=~((abs(ahead) < top) | (top <= 0.0)))
        return concat(scale=scale, chosen=chosen, sign=uint(1, gather(g >= 0.0, chosen)))

    def decode(self, scale: Value, chosen: Value, sign: Value) -> Value:
        return scatter(where(sign > 0.0, scale, -scale), chosen)

    def expected_entries(self, numel: int) -> float:
        """For a rank's own gradients. More are selected from a sum that is encoded again."""
        return numel / self.block * (BASE_ENTRIES + ENTRIES_PER_DOUBLING * math.log2(self.block))
