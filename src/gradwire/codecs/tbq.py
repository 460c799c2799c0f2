"""TBQ: one threshold, sent with a sign or as 0 (HIPRESS; Strom 2015)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import concat, isfinite, map, uint, where


@dataclass(frozen=True)
class TBQ(Codec):
    """Two bits per value: +threshold or -threshold if the value reaches it, else 0.

    Options:
        threshold: absolute, 1e-37 to 1e38: the magnitude of every value sent.

    Needs error feedback, which sends smaller values once they have accumulated. An average of
    payloads reaches the threshold only if all ranks agree, so the reducing rank compares with half
    the threshold, which is rounding to nearest. The fourth code marks a non-finite value and
    decodes to NaN.
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
        """The payload: code 0 is -threshold, 1 is 0, 2 is +threshold, 3 is non-finite."""

        def code(v: Value) -> Value:
            return where(isfinite(v), where(v >= reach, 2, where(v <= -reach, 0, 1)), 3)

        return concat(code=uint(2, map(code, g)))
