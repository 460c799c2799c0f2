"""AdaComp: what the newest gradient makes the largest of its bin (HIPRESS 4.4; Chen 2018)."""

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

MAX_BIN = 32768  # with a selection

# Entries of a bin: so many, and so many times log2 of its size. That is within 10 % of what
# Gaussian gradients give in bins of 50 to 8192, once residuals have built up.
LEAST, GROWTH = 1.0, 0.62


@dataclass(frozen=True)
class AdaComp(Codec):
    """Signs of a few values of every bin, all decoded to one magnitude; needs error feedback.

    Options:
        block: values in a bin, 1 to 32768. The paper takes 50 for convolutions, 500 for the rest.
        density: share of the values that a payload has room for, above 0 and at most 1.

    With x what error feedback makes of the gradient g, a value is sent if |x + g| reaches the
    largest |x| of its bin. So how many are sent follows from the data: 1 to 3 % of Gaussian
    gradients once residuals have built up, 11 % in the first step. If there are more than there is
    room for, the largest are sent. The magnitude is the mean of the bins' largest |x|, over bins
    that are not zero. One non-finite value makes all that is sent non-finite.
    """

    block: int = 512
    density: float = 0.05

    def __post_init__(self) -> None:
        checks.whole(self, "block", 1, MAX_BIN)
        checks.number(self, "density", above=0, most=1)

    def encode(self, g: Value, latest: Value | None = None) -> Payload:
        top = reduce(max, abs(g.blocks(self.block)))
        scale = reduce(sum, top) * inverse(count(top > 0.0))
        ahead = g + (g if latest is None else latest)
        # negated, so that where `top` is NaN the condition holds
        chosen = topk(abs(ahead), share(self.density), among=~((abs(ahead) < top) | (top <= 0.0)))
        return concat(scale=scale, chosen=chosen, sign=uint(1, gather(ahead >= 0.0, chosen)))

    def decode(self, scale: Value, chosen: Value, sign: Value) -> Value:
        return scatter(where(sign > 0.0, scale, -scale), chosen)

    def expected_entries(self, numel: int) -> float:
        """Of a rank's own gradients; of a sum that is encoded again, more are selected."""
        return numel / self.block * (LEAST + GROWTH * math.log2(self.block))
