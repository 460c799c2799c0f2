"""TopK: the values of the largest magnitude and their positions (THESIS 2.2.3)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.sparse import Sparse
from gradwire.lang import Payload, Value
from gradwire.lang.ops import abs, map, share, topk


@dataclass(frozen=True)
class TopK(Sparse):
    """Exactly k = max(1, floor(density * n)) values of the largest magnitude; needs error feedback.

    Options:
        density: the fraction of the values that is kept, above 0 and at most 1.
        values: how they are sent, "fp16" or "fp32".

    Of equal magnitudes the first are kept. NaN and infinities count as the largest, so they are
    sent. With values="fp16", here and in other codecs, a gradient from 65520 on is infinite, and
    what a residual adds beyond fp16 follows in later steps: see Cast.
    """

    density: float = 0.01
    values: str = "fp16"

    def encode(self, g: Value) -> Payload:
        chosen = topk(map(abs, g), share(self.density))
        return self.sent(g, chosen)
