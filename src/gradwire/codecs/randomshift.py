"""RandomShift: rounding to nearest on a lattice that is shifted at random (THESIS 5.5, Def. 1)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import concat, fp32, inverse, map, random, reduce, uint


@dataclass(frozen=True)
class RandomShift(Codec):
    """Uniform quantisation in blocks with one random number a block; unbiased over it.

    Options:
        bits: of a code, 1 to 8.
        block: values that share a lattice, 1 to 65536.

    The lattice has 2^bits points, a step d apart, from the block's minimum to its maximum; all are
    shifted by r ~ U[-d/2, d/2], and each value goes to the nearest. No value is further than d/2
    from the shifted lattice's ends, so r costs no code, and being part of the offset it costs no
    byte. Errors within a block depend on one another, in exchange for the bound of Lemma 4 that
    THESIS uses for quantised weights. As in QSGD the step is sent halved. A non-finite value makes
    its block non-finite.
    """

    bits: int = 8
    block: int = 1024

    def __post_init__(self) -> None:
        checks.whole(self, "bits", 1, 8)
        checks.whole(self, "block", 1, checks.MAX_BLOCK)

    def encode(self, g: Value) -> Payload:
        x = g.blocks(self.block)
        low = reduce(min, x)
        half = fp32((reduce(max, x) * 0.5 - low * 0.5) / (2**self.bits - 1))
        offset = fp32(low + (random("block") * 2.0 - 1.0) * half)
        code = map(lambda v: (v * 0.5 - offset * 0.5) * inverse(half) + 0.5, x)
        return concat(offset=offset, half=half, code=uint(self.bits, code))

    def decode(self, offset: Value, half: Value, code: Value) -> Value:
        return map(lambda k: offset + half * k + half * k, code)
