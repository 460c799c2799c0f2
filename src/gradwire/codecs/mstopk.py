"""MSTopK: the largest values, by a threshold found by counting (ARTOPK 2-C3; Shi et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.topk import Sparse
from gradwire.lang import Payload, Value
from gradwire.lang.ir import Size
from gradwire.lang.ops import (
    abs,
    clamp,
    count,
    floor,
    isfinite,
    reduce,
    share,
    topk,
    where,
)

ROUNDS = 13  # passes over the gradient
PARTS = 4  # each pass cuts the interval that holds the threshold into this many parts
EXCESS = 1.01  # entries that a payload has room for, per value that is kept
INFINITY = float("inf")


@dataclass(frozen=True)
class MSTopK(Sparse):
    """The k = density * n to 1.01 k values of the largest magnitude; needs error feedback.

    Options:
        density: the fraction of the values that is kept, above 0 and at most 1.
        values: how they are sent, "fp16" or "fp32".

    The paper halves the interval from 0 to the largest magnitude 25 times, with one pass over
    memory each. Here each of 13 passes counts against three thresholds and quarters the interval:
    26 bits in all. If more than 1.01 k values reach the threshold, as where the largest is 10^6
    times most others, the largest are sent, of equal ones the first. If there are non-finite
    values, only they are sent. At a reducing rank every pass would decode all payloads again, so
    the 1.01 k largest are selected exactly there.
    """

    density: float = 0.01
    values: str = "fp16"

    def encode(self, g: Value) -> Payload:
        size, top = abs(g), reduce(max, abs(g))
        k = clamp(floor(count(g) * self.density), 1.0, INFINITY)
        low, step = top * 0.0, top / PARTS
        for _ in range(ROUNDS):  # at least k values reach `low`, fewer reach `low + PARTS * step`
            reached = [count(size >= low + step * j) >= k for j in range(1, PARTS)]
            low, step = low + step * sum(where(r, 1.0, 0.0) for r in reached), step / PARTS
        threshold = where(isfinite(top), low, INFINITY)
        chosen = topk(size, self.room, among=~(size < threshold))
        return self.sent(g, chosen)

    def encode_sum(self, g: Value) -> Payload:
        chosen = topk(abs(g), self.room)
        return self.sent(g, chosen)

    @property
    def room(self) -> Size:
        """Entries that a payload has room for."""
        return share(min(1.0, EXCESS * self.density))
