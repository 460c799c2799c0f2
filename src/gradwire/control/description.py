"""What ranks agree on, and the sentence that says where they differ."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

_MOST_TEXT = 1 << 28


@dataclass(frozen=True)
class Description:
    """What one rank holds.

    Attributes:
        rank: whose it is.
        lines: the group's size, what is agreed on, and what is to be alike.
    """

    rank: int
    lines: tuple[str, ...]

    @staticmethod
    def of(rank: int, world_size: int, what: str, description: Sequence[str]) -> Description:
        text = "\n".join([f"world size {world_size}", what, *description])
        return Description(rank, tuple(text.split("\n")))

    @cached_property
    def digest(self) -> bytes:
        """32 bytes, equal where the lines are."""
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=32).digest()

    @property
    def number(self) -> int:
        """The first 8 bytes of the digest: what message headers carry."""
        return int.from_bytes(self.digest[:8], "little")

    def packed(self) -> bytes:
        return zlib.compress("\n".join(self.lines).encode(), 1)

    @staticmethod
    def unpacked(rank: int, packed: bytes) -> Description:
        """The description that was packed.

        Raises:
            ValueError: it is none.
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
        """The first line that differs, and who holds what; the descriptions are not equal."""
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
