"""Rotated: uniform quantisation after a randomised Hadamard transform (UTIL 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks
from gradwire.codecs.qsgd import QSGD, ROUNDINGS
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import rotate


@dataclass(frozen=True)
class Rotated(Codec):
    """QSGD's min-max grid on rotated values; decode rotates back. Unbiased but for "nearest".

    Options:
        rotation: "block", each block on its own, or "full", the whole tensor, which no target
            fuses.
        bits, block, rounding, metadata: as in QSGD.

    A rotation spreads a few large values over all values, which narrows the range that the grid
    covers. Its signs come from a seed that all ranks share. A block whose size is not a power of
    two is cut into powers of two, each rotated on its own. A non-finite value makes its block
    non-finite, and with "full" all values rotated with it. Values above 1e38 / block may overflow.
    """

    rotation: str = "block"
    bits: int = 4
    block: int = 1024
    rounding: str = "dithered"
    metadata: str = "bf16"

    def __post_init__(self) -> None:
        checks.one_of(self, "rotation", ("block", "full"))
        checks.integer(self, "bits", 1, 8)
        checks.integer(self, "block", 1, checks.MAX_BLOCK)
        checks.one_of(self, "rounding", ROUNDINGS)
        checks.one_of(self, "metadata", ("bf16", "fp32"))

    def encode(self, g: Value) -> Payload:
        return self.grid.encode(rotate(g, full=self.rotation == "full"))

    def decode(self, low: Value, half: Value, code: Value) -> Value:
        rotated = self.grid.decode(code, low=low, half=half)
        return rotate(rotated, inverse=True, full=self.rotation == "full")

    @property
    def grid(self) -> QSGD:
        """The codec of the rotated values."""
        return QSGD(self.bits, self.block, "minmax", self.rounding, self.metadata)
