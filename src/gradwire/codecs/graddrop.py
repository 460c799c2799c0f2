"""GradDrop: what is below a sampled quantile is dropped (HIPRESS; Aji and Heafield 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.codecs.topk import STORED
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import abs, concat, gather, scatter, share, sort, topk

SPREAD = 500  # sampled values above the threshold, in a tensor of SIZE values
SIZE = 1_000_000
CAPACITY = 1.25  # entries that a payload has room for, of each that is wanted
LEAST = 64  # entries that it has room for in a small tensor


@dataclass(frozen=True)
class GradDrop(Codec):
    """All values that reach a threshold, set so that about k = density * n do.

    Options:
        density: share of the values that should be kept, above 0 and at most 1.
        values: how they are sent, "fp16" or "fp32".

    Needs error feedback. The threshold is a quantile of a sample, which is so dense (at least 1 %)
    that in tensors of 10^6 values and more the count is within 20 % of k in all but one of 10^5
    cases. A payload has room for 1.25 k values, or 64; if more reach the threshold, the largest are
    sent, so that NaN and infinities are never left out.
    """

    density: float = 0.01
    values: str = "fp16"

    def __post_init__(self) -> None:
        checks.number(self, "density", above=0, most=1)
        checks.one_of(self, "values", STORED)

    def encode(self, g: Value) -> Payload:
        size = abs(g)
        threshold = sort(size, every=self.every)[share(self.density)]
        room = share(min(1.0, CAPACITY * self.density), LEAST)
        chosen = topk(size, room, among=~(size < threshold))
        return concat(chosen=chosen, value=STORED[self.values](gather(g, chosen)))

    def decode(self, chosen: Value, value: Value) -> Value:
        return scatter(value, chosen)

    def expected_entries(self, numel: int) -> float:
        """As many of the values as of the sample."""
        sampled = -(-numel // self.every)
        return numel * share(self.density).of(sampled) / sampled

    @property
    def every(self) -> int:
        """One value of so many is sampled."""
        return min(100, max(1, int(SIZE * self.density / SPREAD)))
