"""What codecs share that send some values with their positions."""

from __future__ import annotations

from gradwire.codecs import checks
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import concat, fp16, fp32, gather, scatter

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
