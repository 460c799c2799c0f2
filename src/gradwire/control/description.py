"""The descriptions that ranks compare, and the error text for a difference."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from itertools import takewhile, zip_longest

_MOST_TEXT = 1 << 28
_LONG, _SHOWN = 200, 60  # characters: lines that are shortened, and the parts that are shown

Lines = Sequence[str]  # the world size, the name of the agreement, and the lines to compare


def described(world_size: int, what: str, description: Sequence[str]) -> Lines:
    return "\n".join([f"world size {world_size}", what, *description]).split("\n")


def digest(world_size: int, what: str, description: Sequence[str]) -> int:
    """The number that `Member.agree` gives for this description."""
    return number(hashed(described(world_size, what, description)))


def hashed(lines: Lines) -> bytes:
    """32 bytes."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=32).digest()


def number(hash: bytes) -> int:
    """Its first 8 bytes, which message headers carry."""
    return int.from_bytes(hash[:8], "little")


def packed(lines: Lines) -> bytes:
    return zlib.compress("\n".join(lines).encode(), 1)


def unpacked(data: bytes) -> Lines:
    """The lines that `packed` returned as bytes.

    Raises:
        ValueError: the bytes are not a description.
    """
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(data, _MOST_TEXT)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not reader.eof:
        raise ValueError("it is cut off")
    return text.decode().split("\n")


def difference(rank: int, mine: Lines, other: int, theirs: Lines) -> str:
    """An error text with the first line that differs; the descriptions must not be equal."""
    pairs = zip_longest(mine, theirs, fillvalue="(nothing)")
    both = next(pair for pair in pairs if pair[0] != pair[1])
    same = takewhile(lambda pair: pair[0] == pair[1], zip(*both, strict=False))
    at = sum(1 for _ in same)
    here, there = (_shortened(line, at) for line in both)
    return (
        f"ranks disagree on {mine[1]}: rank {rank} has '{here}', rank {other} has '{there}'. "
        "Give every rank the same model, options and seed"
    )


def _shortened(line: str, at: int) -> str:
    """The beginning of a long line, and what is around a place in it."""
    if len(line) <= _LONG:
        return line
    first, end = max(at - _SHOWN, _SHOWN), at + _SHOWN
    gap, rest = "..." * (first > _SHOWN), "..." * (end < len(line))
    return f"{line[:_SHOWN]}{gap}{line[first:end]}{rest}"
