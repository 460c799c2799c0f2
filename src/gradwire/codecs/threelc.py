"""3LC: ternary values, five per byte, without blocks of zeros (HIPRESS 4.4; Lim et al. 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from gradwire.codecs import checks
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import abs, concat, keep, map, reduce, trit, uint, where


@dataclass(frozen=True)
class ThreeLC(Codec):
    """{-1, 0, 1} times `sparsity` times the largest magnitude; needs error feedback.

    Options:
        sparsity: multiplier s, 1 to below 2: the larger, the more values become 0.
        block: values that are omitted together if all are 0.

    A value below s/2 times the largest magnitude becomes 0. Five ternary digits make a byte
    (quartic encoding, 1.6 bits per value). The paper run-length encodes zero bytes; here a block of
    zeros costs only its flag, one byte, which needs no scan over earlier values. The default block
    is a compromise: half of it saves a quarter of the bytes of Gaussian values with s = 1 and takes
    twice the time; docs/internals/kernels.md has the measurements. One non-finite value makes
    the whole row non-finite.
    """

    sparsity: float = 1.0
    block: int = 80

    def __post_init__(self) -> None:
        checks.number(self, "sparsity", least=1, below=2)
        checks.integer(self, "block", 1, checks.MAX_BLOCK)

    def encode(self, g: Value) -> Payload:
        x = g.blocks(self.block)
        largest = reduce(max, abs(x))
        scale = reduce(max, largest) * self.sparsity
        half = scale * 0.5
        code = map(lambda v: where(v > half, 1, where(v < -half, 2, 0)), x)
        some = uint(1, largest > half)
        return concat(scale=scale, some=some, code=keep(trit(code), some))

    def decode(self, scale: Value, some: Value, code: Value) -> Value:
        return map(lambda c: scale * where(c > 1.0, -1.0, c), code)

    def expected_entries(self, numel: int) -> float:
        """For Gaussian values without residuals; later, more blocks are kept."""
        # `top` is the median of the largest of `numel` magnitudes
        top = -NormalDist().inv_cdf(math.log(2.0) / (2 * numel + 2))
        reaches = math.erfc(self.sparsity / 2 * top / math.sqrt(2.0))
        return numel * (1.0 - (1.0 - reaches) ** self.block)
