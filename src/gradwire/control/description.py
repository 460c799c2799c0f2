"""The descriptions that ranks compare, and the error text for a difference."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

_MOST_TEXT = 1 << 28


@dataclass(frozen=True)
class Description:
    """One rank's description.

    Attributes:
        rank: the rank.
        lines: the world size, the name of the agreement, and the lines to compare.
    """

    rank: int
    lines: tuple[str, ...]

    @staticmethod
    def of(rank: int, world_size: int, what: str, description: Sequence[str]) -> Description:
        text = "\n".join([f"world size {world_size}", what, *description])
        return Description(rank, tuple(text.split("\n")))

    @cached_property
    def digest(self) -> bytes:
        """32 bytes: the digest of the lines."""
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=32).digest()

    @property
    def number(self) -> int:
        """The first 8 bytes of the digest, which message headers carry."""
        return int.from_bytes(self.digest[:8], "little")

    def packed(self) -> bytes:
        return zlib.compress("\n".join(self.lines).encode(), 1)

    @staticmethod
    def unpacked(rank: int, packed: bytes) -> Description:
        """The description that `packed` returned as bytes.

        Raises:
            ValueError: the bytes are not a description.
        """
        reader = zlib.decompressobj()
        try:
            text = reader.decompress(packed, _MOST_TEXT)
        except zlib.error as error:
            raise ValueError(str(error)) from None
        if not reader.eof:
            raise ValueError("it is cut off")
        return Description(rank, tuple(text.decode().split("\n")))

    def difference(self, other: Description) -> str:
        """An error text with the first line that differs; the descriptions must not be equal."""
        longest = max(len(self.lines), len(other.lines))
        mine, theirs = (
            [*held.lines, *["(nothing)"] * (longest - len(held.lines))] for held in (self, other)
        )
        line = next(i for i in range(longest) if mine[i] != theirs[i])
        return (
            f"ranks disagree on {self.lines[1]}: rank {self.rank} has '{mine[line]}', "
            f"rank {other.rank} has '{theirs[line]}'. Give every rank the same model, options "
            "and seed"
        )


def digest(world_size: int, what: str, description: Sequence[str]) -> int:
    """The number that `Member.agree` gives for this description."""
    return Description.of(0, world_size, what, description).number
