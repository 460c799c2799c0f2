"""TernGrad: a few levels over the whole gradient (HiPress Fig. 5; Wen et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import (
    abs,
    clamp,
    concat,
    fp32,
    inverse,
    map,
    random,
    reduce,
    uint,
    where,
)


@dataclass(frozen=True)
class TernGrad(Codec):
    """One grid for the whole gradient; stochastic rounding, so unbiased.

    Options:
        form: "minmax", 2^bits levels from the minimum to the maximum (HiPress Fig. 5), or
            "ternary", {-1, 0, 1} times the largest magnitude (the original).
        bits: of a code, 1 to 8; the ternary form takes 2.

    Reductions run over the whole row, so a row must not be cut. One non-finite value makes the
    whole row non-finite. As in QSGD, half the grid's step is sent.
    """

    form: str = "minmax"
    bits: int = 2

    contracts = False  # the error grows with the number of values, the largest need not

    def __post_init__(self) -> None:
        checks.one_of(self, "form", ("minmax", "ternary"))
        least, most = (1, 8) if self.form == "minmax" else (2, 2)
        checks.integer(self, "bits", least, most, given="form")

    def encode(self, g: Value) -> Payload:
        if self.form == "ternary":
            scale = fp32(reduce(max, map(abs, g)))
            level = map(lambda v: where(scale > 0.0, v / scale, 0.0) + 1.0 + random(), g)
            return concat(scale=scale, code=uint(2, clamp(level, 0, 2)))
        low = fp32(reduce(min, g))
        half = fp32((reduce(max, g) * 0.5 - low * 0.5) / (2**self.bits - 1))
        code = map(lambda v: (v * 0.5 - low * 0.5) * inverse(half) + random(), g)
        return concat(low=low, half=half, code=uint(self.bits, code))

    def decode(self, code: Value, **grid: Value) -> Value:
        if self.form == "ternary":
            return map(lambda k: grid["scale"] * (k - 1.0), code)
        low, half = grid["low"], grid["half"]
        return map(lambda k: low + half * k + half * k, code)
