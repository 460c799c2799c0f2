"""RandomK: one value of every few, its place drawn by all ranks alike (THESIS 2.2.3)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.codecs.topk import STORED
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import concat, floor, index, map, random, reduce, where


@dataclass(frozen=True)
class RandomK(Codec):
    """Of every 1 / density consecutive values one, which is all that is sent.

    Options:
        density: share of the values that is kept, at least 1/65536 and at most 1; 1 / density is
            rounded to a whole number of values.
        values: how they are sent, "fp16" or "fp32".
        unbiased: scale what is sent by 1 / density, so that the decoded values are right on
            average: in the algorithm all_gather, and in reduce-scatter and all-gather of shards.
            It takes no error feedback; without it the codec needs that.

    Places come from a seed that all ranks share, so they are never sent, and sums of payloads stand
    at the same places as the payloads. A sum is not scaled again. The last block may be shorter;
    then a place beyond its end sends nothing. A non-finite value makes its block non-finite, also
    where it is not picked.
    """

    density: float = 0.01
    values: str = "fp16"
    unbiased: bool = False

    def __post_init__(self) -> None:
        checks.number(self, "density", least=1 / checks.MAX_BLOCK, most=1)
        checks.one_of(self, "values", STORED)
        checks.one_of(self, "unbiased", (False, True))

    def encode(self, g: Value) -> Payload:
        return self.picked(g, self.scale)

    def encode_sum(self, g: Value) -> Payload:
        return self.picked(g, 1.0)

    def decode(self, value: Value) -> Value:
        # a difference is 0, or NaN where the value is not finite
        return map(lambda here: where(here, value, value - value), self.here())

    @property
    def biased(self) -> bool:
        """Whether what is picked is sent as it is, and so the rest is missing on average."""
        return not self.unbiased and self.block > 1

    def picked(self, g: Value, factor: float) -> Payload:
        """The payload: the block's picked value times the factor."""
        x = g.blocks(self.block)
        value = reduce(sum, map(lambda v, here: where(here, v, v - v), x, self.here()))
        return concat(value=STORED[self.values](value * factor))

    def here(self) -> Value:
        """Whether an element is the one that is picked in its block."""
        return index("block") == floor(random("block", shared="pick") * self.block)

    @property
    def scale(self) -> float:
        """What a gradient's picked values are multiplied by."""
        return float(self.block) if self.unbiased else 1.0

    @property
    def block(self) -> int:
        """Values of which one is picked."""
        return round(1.0 / self.density)
