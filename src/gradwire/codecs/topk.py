"""TopK: the values of the largest magnitude and their positions (THESIS 2.2.3); and what all codecs
share that send some values with their positions."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import abs, concat, fp16, fp32, gather, map, scatter, share, topk

STORED = {"fp16": fp16, "fp32": fp32}


class Sparse(Codec):
    """Base class: some entries, and zeros elsewhere; needs error feedback.

    Options:
        density: the fraction of the values that is kept, or that a payload has room for, above 0
            and at most 1.
        values: how they are sent, "fp16" or "fp32". With "fp16" a gradient from 65520 on is
            infinite, and what a residual adds beyond fp16 follows in later steps: see Cast.
    """

    density: float
    values: str

    contracts = True

    def __post_init__(self) -> None:
        checks.number(self, "density", above=0, most=1)
        checks.one_of(self, "values", STORED)

    def sent(self, g: Value, chosen: Value) -> Payload:
        return concat(chosen=chosen, value=STORED[self.values](gather(g, chosen)))

    def decode(self, chosen: Value, value: Value) -> Value:
        return scatter(value, chosen)


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
