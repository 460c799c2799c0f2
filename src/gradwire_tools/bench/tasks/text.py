"""Text that is on every machine: the source of the Python standard library, as bytes or as tokens.

It has about 12 MB without its tests, and with torch's source 58. The text depends on the versions
of Python and torch, so rows of two machines are comparable only with the same ones, which
`SourceText.origin` names.

Tokens are bytes, and the text's most frequent pieces. A *piece* is a word (letters, digits,
underscores) with at most one space before it, a line's end with the spaces after it, a run of
spaces, or one other character. A piece that is not in the vocabulary is spelled in bytes, so every
text has tokens, and tokens give back their text.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradwire.errors import ConfigError

BYTES = 256
_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_VALIDATION_SHARE = 10  # one file in ten
_PIECE = re.compile(rb" ?\w+|\n *| +|[^\w\s]|\s", re.ASCII)


@dataclass(frozen=True)
class SourceText:
    """Symbols to train on and to validate on, split by file: no file is in both.

    Attributes:
        train: bytes (uint8) or tokens (int32), flat; files in the order of their paths, each
            followed by a zero byte.
        validation: the same for the held-out files.
        origin: the source of the text, for people.
    """

    train: Tensor
    validation: Tensor
    origin: str


def read(folder: Path) -> SourceText:
    """The text of all `*.py` files below `folder`, without tests and installed packages.

    The split hashes a file's path below `folder`, so it does not depend on the other files.

    Raises:
        ConfigError: there are no such files, or one side of the split is empty.
    """
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for name in sorted(_sources(folder)):
        held_out = zlib.crc32(name.encode()) % _VALIDATION_SHARE == 0
        parts[held_out].append((folder / name).read_bytes() + b"\0")
    if not parts[True] or not parts[False]:
        raise ConfigError(
            f"not enough Python source below {folder} for the gpt task: "
            f"{len(parts[False])} files to train on, {len(parts[True])} to validate on"
        )
    train, validation = (
        torch.from_numpy(np.frombuffer(b"".join(parts[held_out]), dtype=np.uint8).copy())
        for held_out in (False, True)
    )
    size = (train.numel() + validation.numel()) / 1e6
    origin = f"Python {platform.python_version()} source, {size:.1f} MB"
    return SourceText(train, validation, origin)


@lru_cache(maxsize=1)
def standard_library() -> SourceText:
    """The running Python's standard library, read once per process."""
    return read(Path(sysconfig.get_path("stdlib")))


@lru_cache(maxsize=1)
def with_torch() -> SourceText:
    """The standard library's source, then torch's, read once per process."""
    ours, torchs = standard_library(), read(Path(torch.__file__).parent)
    train = torch.cat([ours.train, torchs.train])
    validation = torch.cat([ours.validation, torchs.validation])
    size = (train.numel() + validation.numel()) / 1e6
    origin = f"source of Python {platform.python_version()} and torch {torch.__version__}"
    return SourceText(train, validation, f"{origin}, {size:.1f} MB")


def _sources(folder: Path) -> Iterator[str]:
    """Paths below `folder`. Folders that are left out are not entered: they can have 10^5 files."""
    for path, folders, files in os.walk(folder):
        folders[:] = set(folders) - _NOT_SOURCE
        for name in files:
            if name.endswith(".py"):
                yield Path(path, name).relative_to(folder).as_posix()


def encode(text: SourceText, vocabulary: int) -> SourceText:
    """The text as int32 tokens below `vocabulary`.

    Raises:
        ConfigError: the vocabulary has no room for the bytes, or the text has too few pieces.
    """
    if vocabulary < BYTES:
        raise ConfigError(f"vocabulary={vocabulary}: {BYTES} tokens are bytes; give more")
    train, validation = (
        _PIECE.findall(part.numpy().tobytes()) for part in (text.train, text.validation)
    )
    # Of equally frequent pieces, the first in the text: the result does not depend on the run.
    counts = Counter(piece for piece in train if len(piece) > 1)
    frequent = [piece for piece, _ in counts.most_common(vocabulary - BYTES)]
    if len(frequent) < vocabulary - BYTES:
        raise ConfigError(
            f"vocabulary={vocabulary}: the text has {len(frequent)} pieces; "
            f"give {BYTES + len(frequent)} at most"
        )
    number = {piece: BYTES + i for i, piece in enumerate(frequent)}
    sides = (_tokens(train, number), _tokens(validation, number))
    return SourceText(*sides, f"{text.origin}, {vocabulary} tokens")


def _tokens(pieces: list[bytes], number: dict[bytes, int]) -> Tensor:
    spelled = ([number[piece]] if piece in number else piece for piece in pieces)
    found = itertools.chain.from_iterable(spelled)
    return torch.from_numpy(np.fromiter(found, dtype=np.int32))


@lru_cache(maxsize=2)
def tokens(vocabulary: int, source: Callable[[], SourceText] = standard_library) -> SourceText:
    """The text of `source` as tokens, made once per process (some seconds)."""
    return encode(source(), vocabulary)
