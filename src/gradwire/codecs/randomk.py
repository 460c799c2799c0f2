"""RandomK: one random value per block, at the same position on all ranks (THESIS 2.2.3)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.codecs.topk import STORED
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import concat, floor, index, map, random, reduce, where


@dataclass(frozen=True)
class RandomK(Codec):
    """One of every 1 / density consecutive values; nothing else is sent.

    Options:
        density: the fraction of the values that is kept, at least 1/65536 and at most 1; 1 /
            density is rounded to a whole number of values.
        values: how they are sent, "fp16" or "fp32".
        unbiased: scale the sent values by 1 / density, so that the decoded values are unbiased:
            with the algorithm all_gather, and in reduce-scatter and all-gather of shards. Use it
            without error feedback; the codec needs error feedback otherwise.

    Positions come from a seed that all ranks share, so they are never sent, and a sum of payloads
    has the positions of the payloads. A sum is not scaled again. If the last block is shorter and
    the position is beyond its end, 0 is sent. A non-finite value makes its block non-finite, even
    if it is not the one picked.
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
        # value - value is 0, or NaN if the value is not finite
        return map(lambda hit: where(hit, value, value - value), self.is_picked())

    @property
    def biased(self) -> bool:
        """Whether what is picked is sent as it is, and so the rest is missing on average."""
        return not self.unbiased and self.block > 1

    @property
    def contracts(self) -> bool:
        """Scaled by n, one of n values has n - 1 times their squared norm as error."""
        return not self.unbiased or self.block <= 2

    def picked(self, g: Value, factor: float) -> Payload:
        """The payload: each block's picked value times the factor."""
        x = g.blocks(self.block)
        value = reduce(sum, map(lambda v, hit: where(hit, v, v - v), x, self.is_picked()))
        return concat(value=STORED[self.values](value * factor))

    def is_picked(self) -> Value:
        """Whether an element is the one picked in its block."""
        return index("block") == floor(random("block", shared="pick") * self.block)

    @property
    def scale(self) -> float:
        """The factor applied to a gradient's picked values."""
        return float(self.block) if self.unbiased else 1.0

    @property
    def block(self) -> int:
        """Values per block, one of which is picked."""
        return round(1.0 / self.density)
