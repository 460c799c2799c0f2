"""Stores: memory of a process in which its peers read messages in place.

A process has one store for all of its groups: a sparse anonymous file, as large as the machine's
memory where limits allow. Memory is allocated when it is taken, and freed when it is given back.
Peers map the whole store once for all groups, so they can read whatever is written there later.

Groups and views keep the stores that they use alive: a store is unmapped with its last group and
its last view. The process's own store is made for the first group, and made again if a later group
finds it unmapped.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import resource
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger("gradwire")

_MOST = 1 << 36
_LEAST = 1 << 24  # a smaller store is not worth its cost
_SEALS = 7  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW (Linux only): the size is fixed


def room(peers: int) -> int:
    """Bytes of the store of a process with `peers` peers.

    0 where the limits on file size or address space are too low.
    """
    longest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    size = min(_MOST, os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE)
    if longest != resource.RLIM_INFINITY:
        size = min(size, longest)
    if (space := space_for_stores()) is not None:
        size = min(size, space // (peers + 1))
    return size // mmap.PAGESIZE * mmap.PAGESIZE if size >= _LEAST else 0


def space_for_stores() -> int | None:
    """Bytes of address space for all stores that this process maps; None: no limit."""
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if space == resource.RLIM_INFINITY else space // 4


def make_file(name: str, nbytes: int) -> int:
    """A descriptor of a new anonymous file of fixed size, for peers to map.

    Raises:
        OSError: there are no descriptors, or no memory.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def size_of(fd: int) -> int:
    """Bytes of a peer's file; 0 if its size is not fixed."""
    return os.fstat(fd).st_size if fcntl.fcntl(fd, fcntl.F_GET_SEALS) == _SEALS else 0


def at_end(of: object, release: Callable[..., object], *arguments: Any) -> None:
    """Call `release` as `of` ends; not at exit, nor in a forked child, which has none of it."""
    pid = os.getpid()

    def end() -> None:
        if os.getpid() == pid:
            release(*arguments)

    weakref.finalize(of, end).atexit = False


def view(address: int, nbytes: int, *kept: object) -> tuple[torch.Tensor, Any]:
    """A tensor (uint8) of memory; and an object that ends with its last view, and until then keeps
    others alive."""
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    memory.kept = kept  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8), memory


class Mapped:
    """A store mapped into this process, until the last reference to it or to a view of it.

    Args:
        library: from `shm_library.load`.
        fd: its file; the caller keeps the descriptor.
        nbytes: size of the store.

    Attributes:
        address: address of its first byte.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, library: Any, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = library.shm_map(fd, nbytes)
        if not self.address:
            raise OSError(f"cannot map {nbytes} bytes")
        at_end(self, library.shm_unmap, self.address, nbytes)


class ProcessStore(Mapped):
    """This process's own store.

    Attributes:
        fd: its file, which is passed to peers.
        token: 16 bytes, its random name.

    Raises:
        OSError: there is no memory, or no descriptor, for it.
    """

    def __init__(self, library: Any, nbytes: int) -> None:
        self.fd = make_file("gradwire-store", nbytes)
        try:
            super().__init__(library, self.fd, nbytes)
        except OSError:
            os.close(self.fd)
            raise
        at_end(self, os.close, self.fd)  # a forked child has closed it (Stores.forget)
        self.token = secrets.token_bytes(16)
        self.pid = os.getpid()  # a forked child may have other memory at this address
        self._library = library
        self._lock = threading.RLock()  # `give` may be called during garbage collection
        self._taken: dict[int, int] = {}  # address -> bytes
        self._warned = False

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        with self._lock:
            return sum([*self._taken.values()])

    def take(self, nbytes: int) -> tuple[int, int] | None:
        """Allocate whole pages, first fit: (address, bytes); None, with one warning that gives the
        reason, if there are none."""
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
            if reason is None:
                self._taken[at] = needed
                return at, needed
            if not self._warned:
                log.warning(
                    "no shared memory for %d bytes (%s): messages are copied instead of read in "
                    "place", nbytes, reason,
                )  # fmt: skip
            self._warned = True
            return None

    def give(self, address: int) -> None:
        """Give back what was taken; no peer may read it any more."""
        if os.getpid() == self.pid:
            with self._lock:
                self._library.shm_empty(address, self._taken.pop(address))


class Store:
    """One group's share of this process's store."""

    def __init__(self, whole: ProcessStore) -> None:
        self.whole = whole
        self._taken: dict[int, tuple[int, weakref.ref[Any]]] = {}  # address -> (bytes, its view)

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return sum(nbytes for nbytes, _ in [*self._taken.values()])

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Memory (uint8). None, with one warning per process that gives the reason, if there is
        none; None in a forked child."""
        if os.getpid() != self.whole.pid or (found := self.whole.take(nbytes)) is None:
            return None
        address, length = found
        memory, held = view(address, max(nbytes, 1), self.whole)
        self._taken[address] = length, weakref.ref(held)
        return memory[:nbytes]

    def give(self, memory: torch.Tensor) -> None:
        """Give back memory, if it was taken here; no peer may read it any more."""
        address = memory.data_ptr()
        if os.getpid() == self.whole.pid and address in self._taken:
            del self._taken[address]
            self.whole.give(address)

    def close(self, is_lent: Callable[[int, int], bool]) -> None:
        """Give back what is left, each part with its last view.

        Memory for which `is_lent(address, bytes)` holds, which peers still read, stays until the
        whole store is unmapped.
        """
        while self._taken:
            address, (nbytes, held) = self._taken.popitem()
            if is_lent(address, nbytes):
                continue
            if (used := held()) is None:
                self.whole.give(address)
            else:
                at_end(used, self.whole.give, address)


class Stores:
    """The stores that a process has mapped, its own and its peers'; tests make several to emulate
    as many processes."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._lock = threading.Lock()
        self._mapped: weakref.WeakValueDictionary[bytes, Mapped] = weakref.WeakValueDictionary()
        self._own: Callable[[], ProcessStore | None] = lambda: None

    def own(self, library: Any, peers: int) -> ProcessStore:
        """This process's store; made if missing, for a group with `peers` peers on the machine.

        Raises:
            OSError: resource limits are too low, or there is no memory or no descriptor.
        """
        with self._lock:
            store = self._own()
            if store is None:
                nbytes = room(peers)
                if not nbytes:
                    raise OSError("the limits on file size or address space are too low for it")
                store = ProcessStore(library, nbytes)
                self._own = weakref.ref(store)
                self._mapped[store.token] = store
            return store

    def of_peer(self, library: Any, token: bytes, fd: int) -> Mapped:
        """The store with this token, whose file is `fd` (the caller keeps the descriptor).

        Raises:
            OSError: it is no store, resource limits are too low, or it cannot be mapped.
        """
        with self._lock:
            store = self._mapped.get(token)
            if store is None:
                nbytes, space = size_of(fd), space_for_stores()
                if not nbytes:
                    raise OSError("its store is empty, or could change its size")
                used = sum(each.nbytes for each in self._mapped.values())
                if space is not None and used + nbytes > space:
                    raise OSError("the limit on address space is too low for its store")
                store = self._mapped[token] = Mapped(library, fd, nbytes)
            return store

    def forget(self) -> None:
        """In a forked child, which does not inherit the memory: close the parent's store, so that
        it ends with the parent."""
        if (store := self._own()) is not None:
            os.close(store.fd)
        self._clear()


STORES = Stores()
os.register_at_fork(after_in_child=STORES.forget)
