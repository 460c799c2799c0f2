"""Ends of shared memory whose ranks are threads of one process."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.errors import TransportError
from gradwire.transport import shm, shm_library
from gradwire.transport.shm import Shm
from gradwire.transport.shm_store import Stores
from ranks import at_once, caught

Key = tuple[int, int, int]  # source, destination, tag


def content(key: Key, place: int = 0, size: int = 0) -> torch.Tensor:
    """The bytes of a message: of a key, the one at this place."""
    seed = hash((*key, place)) % (1 << 31)
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed)).byte()


def nothing(size: int = 1) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def taken(end: Any, nbytes: int) -> torch.Tensor:
    """Memory of a rank's store."""
    assert end.store is not None
    memory: torch.Tensor | None = end.store.take(nbytes)
    assert memory is not None
    return memory


def exchanged(lender: Any, borrower: Any, data: torch.Tensor, **how: Any) -> torch.Tensor:
    """The message, once it has arrived and been given back, and its send has ended."""
    loan = borrower.borrow(len(data), lender.rank, 7)
    sent = lender.isend(data, borrower.rank, 7, **how)
    message: torch.Tensor = loan.wait()
    assert torch.equal(message, data)
    loan.give_back()
    sent.wait()
    return message


@contextmanager
def compiled(source: str, **constants: float) -> Iterator[None]:
    """With another source in C, and other constants of shm.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shm_library, "source", lambda: source)
        for name, value in constants.items():
            patch.setattr(shm, name, value)
        shm_library.load.cache_clear()
        yield
    shm_library.load.cache_clear()


def open_files() -> list[str]:
    """What this process's descriptors are of."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return links


def mapped() -> Counter[str]:
    """How often each of gradwire's files is mapped: (inode) name -> mappings."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    named = [(line[4], line[5]) for line in lines if "memfd:gradwire" in line[-1]]
    return Counter(f"{inode} {name.strip()}" for inode, name in named)


def linked(
    world_size: int,
    timeout: float = 20.0,
    ring_bytes: int | None = None,
    stores: Sequence[Stores] | None = None,
    pids: Mapping[int, int] | None = None,
) -> list[Shm]:
    """Every rank's end, each connected with all others.

    Args:
        stores: of each rank's process; None: each its own.
        pids: of ranks that count as other processes.
    """
    everyone = range(world_size)
    made = [
        Shm(
            rank, world_size, [p for p in everyone if p != rank], timeout, ring_bytes,
            stores[rank] if stores else Stores(),
        )
        for rank in everyone
    ]  # fmt: skip
    for end, peer in permutations(made, 2):
        pid = (pids or {}).get(peer.rank, os.getpid())
        end.connect(peer.rank, peer.fd, os.pidfd_open(pid), peer.lends)
    return made


@contextmanager
def ends(
    world_size: int,
    timeout: float = 20.0,
    ring_bytes: int | None = None,
    stores: Stores | None = None,
    pids: Mapping[int, int] | None = None,
) -> Iterator[list[Shm]]:
    """Every rank's end, as `linked`, until they are closed; all ranks use `stores`, as one process,
    or each its own, as separate processes."""
    made = linked(world_size, timeout, ring_bytes, stores and [stores] * world_size, pids)
    for end in made:
        end.passed()
    try:
        yield made
    finally:  # together, as ranks do: each waits for others to read its last sends
        at_once(*(end.close for end in made))


@contextmanager
def killable() -> Iterator[tuple[Shm, Shm, subprocess.Popen[bytes]]]:
    """Two ends; the second counts as one of a process that can be killed."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with ends(2, 600.0, pids={1: process.pid}) as (first, second):
            yield first, second, process
            process.kill()
    finally:
        process.kill()
        process.wait()


@contextmanager
def forged() -> Iterator[tuple[Shm, Callable[..., None]]]:
    """An end, and a peer's hand that writes numbers at an offset of the memory of a rank."""
    made = linked(2, 5.0, 1 << 12)

    def write(rank: int, offset: int, *numbers: int) -> None:
        with mmap.mmap(made[rank].fd, made[rank].nbytes) as segment:
            segment[offset : offset + 8 * len(numbers)] = struct.pack(f"<{len(numbers)}Q", *numbers)

    yield made[0], write
    for end in made:
        end.close()


def failing(body: Callable[[], object]) -> TransportError:
    """The error that `body` raises; ends here have longer timeouts than this waits."""
    (error,) = at_once(lambda: caught(body))
    assert isinstance(error, TransportError)
    return error
