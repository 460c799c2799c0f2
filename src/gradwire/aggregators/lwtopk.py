"""Exact top-k by all-gather of sparse payloads, with error feedback: LWTopk (ARTOPK 2-C).

Per selection over n values, with k = max(1, floor(density * n)), every rank sends its own k largest
values and their positions to all others, and sums what it receives in the order of ranks. Up to
N k values of the average are not zero. Payload bytes per rank and step: k (v + p / 8) + 2 n / B,
of v bytes per value, p bits per position in its block of B values, and 2 bytes for a block's count;
it goes to N - 1 ranks. One round per scope. Nothing is lost: the residual keeps the values that are
not sent, and what fp16 rounds off those that are (with bf16 gradients, up to the average's rounding
to bf16).

Other sparse codecs run the same way by name: "mstopk:algorithm=all_gather:scope=model" (the paper's
MSTopk, a threshold over all values), "hardthreshold:algorithm=all_gather" (Rethink-GS),
"randomk:unbiased=true:algorithm=all_gather".
"""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.aggregators.compressed import SCOPES, Encoded
from gradwire.codecs import TopK, checks
from gradwire.codecs.topk import STORED
from gradwire.lang import Codec


@dataclass(frozen=True)
class LWTopK(Encoded):
    """The k largest values of each parameter, or of all together, from every rank.

    Args:
        density: the share of values that each rank sends, above 0 and at most 1.
        values: how they are sent, "fp16" or "fp32".
        scope: what one selection is over: "layer", the paper's, each parameter by itself while
            backward runs; "model", all parameters, after the last bucket of backward.
    """

    density: float = 0.01
    values: str = "fp16"
    scope: str = "layer"

    algorithm = "all_gather"
    needs_feedback = True

    def __post_init__(self) -> None:
        checks.number(self, "density", above=0, most=1)
        checks.one_of(self, "values", STORED)
        checks.one_of(self, "scope", SCOPES)

    @property
    def codec(self) -> Codec:  # type: ignore[override]
        return TopK(self.density, self.values)

    def recorded(self) -> str:
        whole = ", whole model" if self.scope == "model" else ""
        return f"lwtopk(density={self.density:g}, values={self.values}{whole})"
