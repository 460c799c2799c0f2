"""DGC: the largest of the values above a sampled threshold (HIPRESS; Lin et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.topk import Sparse
from gradwire.lang import Payload, Value
from gradwire.lang.ops import abs, share, sort, topk

EVERY = 100  # the sample is 1 % of the values
MARGIN = 2.0  # candidates per value that is kept
MIN_ABOVE = 20  # sampled values above the threshold


@dataclass(frozen=True)
class DGC(Sparse):
    """About k = max(1, floor(density * n)) values of the largest magnitude; needs error feedback.

    Options:
        density: the fraction of the values that is kept, above 0 and at most 1.
        values: how they are sent, "fp16" or "fp32".

    A 1 % sample gives a threshold that 2 k values should reach. The paper does not give this
    margin: with 1.5, one in 60 tensors of 10^6 values falls short by a fifth; with 2, one in 4000.
    Of the values that reach the threshold, the k largest are sent; if fewer do, all of them are.
    NaN and infinities always reach it. Momentum correction, clipping and warm-up belong to the
    aggregator.
    """

    density: float = 0.001
    values: str = "fp16"

    def encode(self, g: Value) -> Payload:
        size = abs(g)
        threshold = sort(size, every=EVERY)[share(min(1.0, MARGIN * self.density), MIN_ABOVE)]
        chosen = topk(size, share(self.density), among=~(size < threshold))
        return self.sent(g, chosen)
