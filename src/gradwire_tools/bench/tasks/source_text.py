"""Text that is on every machine: the source of the Python standard library.

It has about 12 MB without its tests. The text depends on the Python version, so rows of two
machines are comparable only with the same version, which `SourceText.origin` names.
"""

from __future__ import annotations

import os
import platform
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradwire.errors import ConfigError

_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_VALIDATION_SHARE = 10  # one file in ten


@dataclass(frozen=True)
class SourceText:
    """Bytes to train on and to validate on, split by file: no file is in both.

    Attributes:
        train: uint8, flat; files in the order of their paths, each followed by a zero byte.
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
    train, validation = (_flat(parts[held_out]) for held_out in (False, True))
    size = (train.numel() + validation.numel()) / 1e6
    origin = f"Python {platform.python_version()} source, {size:.1f} MB"
    return SourceText(train, validation, origin)


@lru_cache(maxsize=1)
def standard_library() -> SourceText:
    """The running Python's standard library, read once per process."""
    return read(Path(sysconfig.get_path("stdlib")))


def _sources(folder: Path) -> Iterator[str]:
    """Paths below `folder`. Folders that are left out are not entered: they can have 10^5 files."""
    for path, folders, files in os.walk(folder):
        folders[:] = set(folders) - _NOT_SOURCE
        for name in files:
            if name.endswith(".py"):
                yield Path(path, name).relative_to(folder).as_posix()


def _flat(files: list[bytes]) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"".join(files), dtype=np.uint8).copy())
