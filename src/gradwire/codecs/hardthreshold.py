"""HardThreshold: every value that reaches an absolute threshold (THESIS 4.3, Rethink-GS; Sahu et
al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.codecs.topk import STORED
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import abs, concat, gather, scatter, share, topk


@dataclass(frozen=True)
class HardThreshold(Codec):
    """The values of a magnitude of `threshold` or more; needs error feedback.

    Options:
        threshold: absolute, 1e-37 to 1e38. The default is THESIS Table 4.4's for an image model.
        density: share of the values that a payload has room for, above 0 and at most 1.
        values: how they are sent, "fp16" or "fp32".

    If more values reach the threshold than there is room for, the largest are sent, and error
    feedback keeps the others. NaN and infinities are the largest, so they travel. A threshold says
    nothing about values, so formulas count with as many as there is room for.
    """

    threshold: float = 4.72e-3
    density: float = 0.05
    values: str = "fp16"

    def __post_init__(self) -> None:
        checks.number(self, "threshold", least=1e-37, most=1e38)
        checks.number(self, "density", above=0, most=1)
        checks.one_of(self, "values", STORED)

    def encode(self, g: Value) -> Payload:
        size = abs(g)
        chosen = topk(size, share(self.density), among=~(size < self.threshold))
        return concat(chosen=chosen, value=STORED[self.values](gather(g, chosen)))

    def decode(self, chosen: Value, value: Value) -> Value:
        return scatter(value, chosen)
