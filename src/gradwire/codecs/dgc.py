"""DGC's selection: the largest values, found among those above a sampled threshold (HIPRESS; Lin
et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.codecs.topk import STORED
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import abs, concat, gather, scatter, share, sort, topk

SAMPLED = 100  # one value of so many: 1 %
MARGIN = 2.0  # candidates, for each value that is wanted
LEAST = 20  # sampled values above the threshold


@dataclass(frozen=True)
class DGC(Codec):
    """About k = max(1, floor(density * n)) values of the largest magnitude; needs error feedback.

    Options:
        density: share of the values that is kept, above 0 and at most 1.
        values: how they are sent, "fp16" or "fp32".

    A sample of 1 % gives a threshold that twice as many as wanted should reach (the paper is silent
    on the margin: with 1.5 one of 60 tensors of 10^6 values falls short by a fifth, with 2 one of
    4000). Of those that reach it, the k largest are sent exactly; if fewer do, all of them. NaN and
    infinities always reach it. Momentum correction, clipping and warm-up are the aggregator's.
    """

    density: float = 0.001
    values: str = "fp16"

    def __post_init__(self) -> None:
        checks.number(self, "density", above=0, most=1)
        checks.one_of(self, "values", STORED)

    def encode(self, g: Value) -> Payload:
        size = abs(g)
        threshold = sort(size, every=SAMPLED)[share(min(1.0, MARGIN * self.density), LEAST)]
        chosen = topk(size, share(self.density), among=~(size < threshold))
        return concat(chosen=chosen, value=STORED[self.values](gather(g, chosen)))

    def decode(self, chosen: Value, value: Value) -> Value:
        return scatter(value, chosen)
