"""GradDrop: drop the values below a sampled quantile (HIPRESS; Aji and Heafield 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.topk import Sparse
from gradwire.lang import Payload, Value
from gradwire.lang.ops import abs, share, sort, topk

# In a tensor of REFERENCE_NUMEL values, SAMPLED_ABOVE sampled values exceed the threshold.
SAMPLED_ABOVE = 500
REFERENCE_NUMEL = 1_000_000
CAPACITY = 1.25  # entries that a payload has room for, per value that should be kept
MIN_CAPACITY = 64  # entries that a payload of a small tensor has room for


@dataclass(frozen=True)
class GradDrop(Sparse):
    """All values that reach a threshold, chosen so that about k = density * n do.

    Options:
        density: the fraction of the values that should be kept, above 0 and at most 1.
        values: how they are sent, "fp16" or "fp32".

    Needs error feedback. The threshold is a quantile of a sample of at least 1 %. In tensors of
    10^6 values and more, the count is then within 20 % of k in all but one in 10^5 cases. A payload
    has room for 1.25 k values, or for 64 if that is more. If more values reach the threshold, the
    largest are sent, so NaN and infinities are never left out.
    """

    density: float = 0.01
    values: str = "fp16"

    def encode(self, g: Value) -> Payload:
        size = abs(g)
        threshold = sort(size, every=self.every)[share(self.density)]
        room = share(min(1.0, CAPACITY * self.density), MIN_CAPACITY)
        chosen = topk(size, room, among=~(size < threshold))
        return self.sent(g, chosen)

    def expected_entries(self, numel: int) -> float:
        """The same fraction of the values as of the sample."""
        sampled = -(-numel // self.every)
        return numel * share(self.density).of(sampled) / sampled

    @property
    def every(self) -> int:
        """The sample has one of this many values."""
        return min(100, max(1, int(REFERENCE_NUMEL * self.density / SAMPLED_ABOVE)))
