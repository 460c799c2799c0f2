"""RandomShift: rounding to nearest on a randomly shifted lattice (THESIS 5.5, Def. 1)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import concat, fp32, inverse, map, random, reduce, uint


@dataclass(frozen=True)
class RandomShift(Codec):
    """Uniform quantisation in blocks with one random number per block; unbiased over that number.

    Options:
        bits: of a code, 1 to 8.
        block: values that share a lattice, 1 to 65536.

    The lattice has 2^bits points at distance d, from the block's minimum to its maximum. All points
    are shifted by r ~ U[-d/2, d/2], and each value is rounded to the nearest. No value is further
    than d/2 from the shifted lattice, so r needs no extra code; it is added to the offset, so it
    needs no extra byte. Errors within a block are correlated, in exchange for the bound of Lemma 4,
    which THESIS uses for quantised weights. As in QSGD, half the step is sent. A non-finite value
    makes its block non-finite.
    """

    bits: int = 8
    block: int = 1024

    def __post_init__(self) -> None:
        checks.integer(self, "bits", 1, 8)
        checks.integer(self, "block", 1, checks.MAX_BLOCK)

    def encode(self, g: Value) -> Payload:
        x = g.blocks(self.block)
        low = reduce(min, x)
        half = fp32((reduce(max, x) * 0.5 - low * 0.5) / (2**self.bits - 1))
        offset = fp32(low + (random("block") * 2.0 - 1.0) * half)
        code = map(lambda v: (v * 0.5 - offset * 0.5) * inverse(half) + 0.5, x)
        return concat(offset=offset, half=half, code=uint(self.bits, code))

    @property
    def contracts(self) -> bool:
        """As of QSGD with dithered rounding, whose errors have this one's distribution."""
        return bool(self.block <= 6 * (2**self.bits - 1) ** 2)

    def decode(self, offset: Value, half: Value, code: Value) -> Value:
        return map(lambda k: offset + half * k + half * k, code)
