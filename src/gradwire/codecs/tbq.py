"""TBQ: plus, minus or nothing of one threshold (HIPRESS; Strom 2015)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import concat, isfinite, map, uint, where


@dataclass(frozen=True)
class TBQ(Codec):
    """Two bits a value: +threshold or -threshold where the value reaches it, else 0.

    Options:
        threshold: absolute, 1e-37 to 1e38: the size of all that is ever sent.

    Needs error feedback, which sends what is smaller once it has added up. An average of payloads
    is a fraction of the threshold, which only unanimous ranks would reach, so at the rank that
    reduces half of it suffices: that is rounding to nearest. The fourth code stands for a value
    that is not finite and decodes to NaN.
    """

    threshold: float = 1e-3

    def __post_init__(self) -> None:
        checks.number(self, "threshold", least=1e-37, most=1e38)

    def encode(self, g: Value) -> Payload:
        return self.coded(g, self.threshold)

    def encode_sum(self, g: Value) -> Payload:
        return self.coded(g, self.threshold / 2)

    def decode(self, code: Value) -> Value:
        nan = float("nan")
        return map(lambda c: where(c > 2.0, nan, (c - 1.0) * self.threshold), code)

    def coded(self, g: Value, reach: float) -> Payload:
        """The payload: code 0 is minus, 1 nothing, 2 plus, 3 not finite."""

        def code(v: Value) -> Value:
            return where(isfinite(v), where(v >= reach, 2, where(v <= -reach, 0, 1)), 3)

        return concat(code=uint(2, map(code, g)))
