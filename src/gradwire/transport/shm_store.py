"""Stores: memory that a rank lends. A message that lies there its peers read where it lies.

A store is the end of its rank's segment: as large as the machine's memory, as far as limits admit,
but nothing until it is used, and nothing again once it was given back. Peers map it with the
segment, so whatever is put there later is within their reach.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import resource
import threading
import weakref
from typing import Any

import torch

log = logging.getLogger("gradwire")

_MOST = 1 << 36
_LEAST = 1 << 24  # less is not worth it


def room(first: int, peers: int) -> int:
    """Bytes of the store of a rank with so many peers, in a segment where it begins at `first`.

    0 where this process may not have files or address space of a sensible size.
    """
    page, space = mmap.PAGESIZE, resource.getrlimit(resource.RLIMIT_AS)[0]
    size = min(_MOST, os.sysconf("SC_PHYS_PAGES") * page)
    longest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if longest != resource.RLIM_INFINITY:
        size = min(size, longest - first)
    if space != resource.RLIM_INFINITY:
        size = min(size, space // (4 * (peers + 1)))  # with the peers' at most a quarter
    return size // page * page if size >= _LEAST else 0


class Mapped:
    """A store in this process's memory, ours or a peer's: as long as it, or a view of it, is used.

    Args:
        library: `shm_library.load`'s.
        fd: of the segment; still the caller's.
        first: where the store begins in it.
        nbytes: of the store.

    Attributes:
        address: of its first byte.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, library: Any, fd: int, first: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = library.shm_map(fd, first, nbytes)
        if not self.address:
            raise OSError(f"cannot map {nbytes} bytes")
        end = weakref.finalize(self, _unmap, library, self.address, nbytes, os.getpid())
        end.atexit = False


class Copy:
    """A message in memory of its own, which its sender could not lend, as long as it is used."""

    def __init__(self, library: Any, address: int) -> None:
        weakref.finalize(self, library.shm_free_copy, address).atexit = False


def view(address: int, nbytes: int, owner: Mapped | Copy) -> torch.Tensor:
    """Bytes (uint8) of memory that stays as long as `owner`."""
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


def _unmap(library: Any, address: int, nbytes: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has none of the memory
        library.shm_unmap(address, nbytes)


class Store(Mapped):
    """This rank's own: memory is taken from it, and given back."""

    def __init__(self, library: Any, fd: int, first: int, nbytes: int) -> None:
        super().__init__(library, fd, first, nbytes)
        self._library = library
        self._lock = threading.Lock()
        self._taken: dict[int, int] = {}  # address -> bytes
        self._pid = os.getpid()  # a forked child has none of the memory, and perhaps other there
        self._warned = False

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        with self._lock:
            return sum(self._taken.values())

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Memory (uint8), the first that fits; None, with one warning that says why, if there is
        none, and None in a forked child."""
        if os.getpid() != self._pid:
            return None
        needed = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            at = self.address
            for address, taken in sorted(self._taken.items()):
                if address - at >= needed:
                    break
                at = address + taken
            reason = None
            if at + needed > self.address + self.nbytes:
                reason = f"the store of {self.nbytes} bytes is full"
            elif error := self._library.shm_fill(at, needed):
                self._library.shm_empty(at, needed)
                reason = os.strerror(error)
            if reason is not None:
                self._warn(nbytes, reason)
                return None
            self._taken[at] = needed
        return view(at, max(nbytes, 1), self)[:nbytes]

    def give(self, memory: torch.Tensor) -> None:
        """Give back what was taken, if it was taken here; nobody reads it any more."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            nbytes = self._taken.pop(memory.data_ptr(), 0)
            if nbytes:
                self._library.shm_empty(memory.data_ptr(), nbytes)

    def _warn(self, nbytes: int, reason: str) -> None:
        if not self._warned:
            log.warning(
                "no shared memory for %d bytes (%s): messages that lie there are copied",
                nbytes, reason,
            )  # fmt: skip
        self._warned = True
