"""HardThreshold: every value that reaches an absolute threshold (THESIS 4.3, Rethink-GS; Sahu et
al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.codecs.topk import Sparse
from gradwire.lang import Payload, Value
from gradwire.lang.ops import abs, share, topk


@dataclass(frozen=True)
class HardThreshold(Sparse):
    """The values whose magnitude is `threshold` or more; needs error feedback.

    Options:
        threshold: absolute, 1e-37 to 1e38. The default is from THESIS Table 4.4, an image model.
        density: the fraction of the values that a payload has room for, above 0 and at most 1.
        values: how they are sent, "fp16" or "fp32".

    A GradScaler scales gradients and changes its scale while training runs: the threshold is then
    of scaled gradients, so it must be given times the scale, and does not follow it.

    If more values reach the threshold than there is room for, the largest are sent, and error
    feedback keeps the others. NaN and infinities count as the largest, so they are sent. The number
    of values sent cannot be predicted from the threshold, so cost formulas assume a full payload.
    """

    threshold: float = 4.72e-3
    density: float = 0.05
    values: str = "fp16"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(self, "threshold", least=1e-37, most=1e38)

    def encode(self, g: Value) -> Payload:
        size = abs(g)
        chosen = topk(size, share(self.density), among=~(size < self.threshold))
        return self.sent(g, chosen)
