"""Shared memory between ranks of one machine: messages are read in place, or copied through a ring.

Each rank owns one anonymous segment (memfd) per group: a page, and a ring for each peer. Its
process owns one store for all groups (`shm_store`). shm_ring.c describes how bytes move,
shm_wait.c how threads wait. A message moves once its receive is posted, so no message is buffered.
A message in its sender's store is lent; all others stream through the ring. A rank takes
4096 + peers x (4096 + ring) bytes per group, whatever is sent, where a ring has 512 KiB for up to 4
peers on the machine, 256 KiB for up to 8, else 128 KiB: at most 2 MiB for up to 16 peers; and what
was taken from its store.

`shm_handshake` passes the peers' segments and stores, as file descriptors.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gradwire.errors import ConfigError, TransportError, again
from gradwire.transport import shm_library, shm_store
from gradwire.transport.shm_library import Ended
from gradwire.transport.shm_store import STORES, Mapped, Store, Stores, at_end

log = logging.getLogger("gradwire")

# All rings of a rank together, and the bounds of one: small enough to stay in cache, large enough
# to hide the wake-up of a thread.
_RINGS_BYTES, _RING_LEAST, _RING_MOST = 1 << 21, 1 << 17, 1 << 19
_SPIN_S = 20e-6  # before a waiter sleeps: about the cost of a sleep and a wake-up
_SPIN_CROWDED_S = 2e-6  # where ranks outnumber cores, so that a spinning rank delays another
_LINGER_S = 2.0  # how long `close` waits for the last sends

_REASONS = {
    Ended.TIMEOUT: "nothing moved within the timeout of {timeout:g} s",
    Ended.DEAD: "its process has ended",
    Ended.FAILED: "it has failed because of rank {blamed}",
    Ended.GONE: "it has destroyed its process group",
    Ended.CORRUPT: "its ring holds invalid data",
}

# (peer, what was tried, reason, the rank that the peer blames) -> the error to raise
Explain = Callable[[int, str, str, "int | None"], TransportError]


def ring_bytes_for(peers: int) -> int:
    """Bytes of each ring of a rank with `peers` peers: a power of two."""
    share = _RINGS_BYTES // max(1, peers)
    return max(_RING_LEAST, min(_RING_MOST, 1 << share.bit_length() - 1))


class Shm:
    """One rank's end of the shared memory of its machine.

    Args:
        rank, world_size: as in torch, within the group.
        peers: the ranks to share memory with; all ranks of the set, with this rank, give the same.
        timeout: seconds that a wait may last.
        ring_bytes: of each ring, a power of two, the same on all; see `ring_bytes_for`.
        stores: the process's; tests that emulate several processes give each its own.

    Attributes:
        fd: descriptor of this rank's segment, for the peers; closed by `passed`.
        nbytes: size of this rank's segment.
        store: memory for messages that peers can borrow, or None.
        lenders: the peers from whose stores this rank can borrow.
        waiting: when each current wait began (time.monotonic).
        library, handle: the compiled part, and its handle of this object.
        lent_from: the stores of the lenders.
        under_way: operations that have not ended; it keeps their buffers alive.
        explain: makes the error to raise, and keeps it in `error`.

    Raises:
        OSError: no memory, or no descriptors, for the segment.
        CompileError: see `shm_library.load`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        peers: Sequence[int],
        timeout: float,
        ring_bytes: int | None = None,
        stores: Stores = STORES,
    ) -> None:
        library = shm_library.load()
        ring_bytes = ring_bytes or ring_bytes_for(len(peers))
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.error: TransportError | None = None
        self.explain: Explain = self._explain
        self.waiting: dict[Any, float] = {}
        self.in_memory = len(peers) == world_size - 1
        self.nbytes = int(library.shm_size(len(peers), ring_bytes))
        self._slots = {peer: slot for slot, peer in enumerate(sorted(peers))}
        self.library = library
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self.under_way: set[Transfer] = set()
        self.lent_from: dict[int, Mapped] = {}
        self._stores = stores
        self.fd = shm_store.make_file(f"gradwire-{rank}", self.nbytes)
        try:
            crowded = len(peers) + 1 > (os.cpu_count() or 1)  # a rank may be bound to one
            spin = int(1e9 * (_SPIN_CROWDED_S if crowded else _SPIN_S))
            self.handle = library.shm_begin(self.fd, len(peers), ring_bytes, spin)
            if not self.handle:
                raise OSError(f"cannot map {self.nbytes} bytes")
        except OSError:
            os.close(self.fd)
            raise
        at_end(self, _let_go, library, self.handle)
        self.store = self._own_store()

    def _own_store(self) -> Store | None:
        try:
            whole = self._stores.own(self.library, len(self._slots))
        except OSError as error:
            log.warning("rank %d: messages are copied through rings: %s", self.rank, error)
            return None
        self.library.shm_lend(self.handle, whole.address, whole.nbytes)
        return Store(whole)

    @property
    def shared_bytes(self) -> int:
        return self.nbytes + (0 if self.store is None else self.store.used)

    @property
    def lent_bytes(self) -> int:
        return int(self.library.shm_lent_bytes(self.handle))

    @property
    def reached(self) -> frozenset[int]:
        return frozenset(self._slots)

    @property
    def lenders(self) -> frozenset[int]:
        return frozenset(self.lent_from)

    @property
    def lends(self) -> tuple[bytes, int] | None:
        """Token and descriptor of this process's store, for the peers; None: no store."""
        return None if self.store is None else (self.store.whole.token, self.store.whole.fd)

    def connect(
        self, peer: int, fd: int, alive_fd: int, lends: tuple[bytes, int] | None = None
    ) -> None:
        """Map `peer`'s segment, `fd`, and the store that it `lends`; the caller keeps the
        descriptors. Takes ownership of `alive_fd`, which is readable once the peer's process has
        ended.

        Raises:
            OSError: the segment differs from this rank's, or cannot be mapped.
        """
        if shm_store.size_of(fd) < self.nbytes:
            raise OSError("the peer's segment is too small, or could change its size")
        near = self._slots[peer]
        far = sum(other < self.rank for other in self._slots) - (peer < self.rank)
        failed = self.library.shm_connect(self.handle, near, fd, far, alive_fd)
        if failed:
            raise OSError(failed, f"cannot map the peer's segment: {os.strerror(failed)}")
        if lends is not None:
            try:
                store = self._stores.of_peer(self.library, *lends)
            except OSError as error:  # every receive tells the peer that this rank cannot borrow
                log.warning("rank %d: rank %d's messages are copied: %s", self.rank, peer, error)
            else:
                self.lent_from[peer] = store
                self.library.shm_borrow_from(self.handle, near, store.address, store.nbytes)

    def passed(self) -> None:
        """Every peer has this rank's segment: close its descriptor."""
        os.close(self.fd)
        self.fd = -1

    def isend(self, data: torch.Tensor, peer: int, tag: int, in_use: int | None = None) -> Transfer:
        link, (address, nbytes) = self._link(peer), _bytes(data)
        counts = nbytes if in_use is None else in_use
        handle = self.library.shm_send(self.handle, link, address, nbytes, counts, tag)
        return Transfer(self, handle or 0, data, nbytes, peer, False, ended=handle is None)

    def irecv(self, data: torch.Tensor, peer: int, tag: int) -> Transfer:
        link, (address, nbytes) = self._link(peer), _bytes(data)
        handle = self.library.shm_receive(self.handle, link, address, nbytes, tag, False)
        return Transfer(self, handle, data, nbytes, peer, True)

    def borrow(self, nbytes: int, peer: int, tag: int) -> ShmLoan:
        assert nbytes > 0
        handle = self.library.shm_receive(self.handle, self._link(peer), None, nbytes, tag, True)
        return ShmLoan(self, handle, None, nbytes, peer, True)

    def _link(self, peer: int) -> int:
        """The number of the link with a peer; raises what has broken this end."""
        if self.error is not None:
            raise again(self.error)
        return self._slots[peer]

    def _explain(self, peer: int, what: str, reason: str, blamed: int | None) -> TransportError:
        if self.error is None:
            culprit = peer if blamed in (None, self.rank) else blamed
            text = f"rank {self.rank}: {what} rank {peer} failed ({reason})"
            self.error = TransportError(text, peer=culprit)
        return self.error

    def stopped(self) -> TransportError:
        return TransportError(f"rank {self.rank}: this process group was destroyed, or has failed")

    def drive(self) -> None:
        """Move bytes until this is closed: for a dedicated thread, where all others may wait for
        something else."""
        self.library.shm_drive(self.handle)

    def fail(self, peer: int) -> None:
        self.library.shm_fail(self.handle, peer)

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child does not inherit the memory
        linger = 0.0 if self.error is not None else min(_LINGER_S, self.timeout)
        with self._closing:
            self.library.shm_stop(self.handle, int(linger * 1e9))
            if self.store is not None:
                self.store.close(partial(self.library.shm_is_lent, self.handle))
            self.store, self.lent_from = None, {}  # views of the stores may still be in use
            if self.fd >= 0:
                self.passed()


def _bytes(data: torch.Tensor) -> tuple[int, int]:
    """The address of a message, and its bytes."""
    if data.dtype is not torch.uint8 or not data.is_contiguous() or data.device.type != "cpu":
        of = "" if data.is_contiguous() else ", not contiguous"
        raise ConfigError(
            f"a message is {data.numel()} x {data.dtype} on {data.device}{of}: "
            "give contiguous uint8 on the CPU"
        )
    return data.data_ptr(), data.numel()


def _let_go(library: Any, handle: int) -> None:
    library.shm_stop(handle, 0)
    library.shm_free(handle)


@dataclass(eq=False, slots=True)
class Transfer:
    """A send, or a receive into memory of the caller; raises TransportError if `end` is stopped."""

    end: Shm
    handle: int
    data: torch.Tensor | None  # in use by any of the rank's threads until the wait returns
    nbytes: int
    peer: int
    receives: bool
    ended: bool = False

    def __post_init__(self) -> None:
        if self.handle == shm_library.REFUSED:
            raise again(self.end.error or self.end.stopped())
        if not self.ended:
            self.end.under_way.add(self)

    def wait(self) -> None:
        if self.ended:
            return
        end = self.end
        begun = time.monotonic()
        end.waiting[self] = begun
        try:
            result = Ended.INTERRUPTED
            while result == Ended.INTERRUPTED:  # by a signal, which Python has handled by now
                left = max(0.0, begun + end.timeout - time.monotonic())
                answer = end.library.shm_wait(end.handle, self.handle, int(left * 1e9))
                result, detail = Ended(answer & 255), answer >> 8
        finally:
            del end.waiting[self]
        if result == Ended.OK:
            self.ended = True
            end.under_way.discard(self)
            if self.receives and detail != self.nbytes:
                raise self._failed(
                    f"rank {self.peer} sent {detail} bytes where {self.nbytes} were expected"
                )
        elif result == Ended.STOPPED:
            raise again(end.error or end.stopped())
        else:
            blamed = detail if result == Ended.FAILED else None
            reason = _REASONS[result].format(timeout=end.timeout, blamed=blamed)
            raise self._failed(reason, blamed)

    def _failed(self, reason: str, blamed: int | None = None) -> TransportError:
        what = "receive from" if self.receives else "send to"
        return self.end.explain(self.peer, what, reason, blamed)


class ShmLoan(Transfer):
    """A receive that borrows its message; see `protocol.Loan`."""

    __slots__ = ()

    def wait(self) -> torch.Tensor:  # type: ignore[override]
        super().wait()
        library = self.end.library
        address = library.shm_message(self.handle)
        if not address:
            raise self._failed(f"no memory for a message of {self.nbytes} bytes", self.end.rank)
        if not library.shm_copy(self.handle):
            return shm_store.view(address, self.nbytes, self.end.lent_from[self.peer])[0]
        message, copy = shm_store.view(address, self.nbytes)
        at_end(copy, library.shm_free_copy, address)
        return message

    def give_back(self) -> None:
        handle, self.handle = self.handle, 0
        if handle:
            self.end.library.shm_give_back(self.end.handle, handle)
