"""Sends and receives in flight in shared memory, and the results of waiting for them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from gradwire.errors import TransportError, again
from gradwire.transport import shm_store
from gradwire.transport.shm_library import Ended

if TYPE_CHECKING:
    from gradwire.transport.shm import Shm

_REASONS = {
    Ended.TIMEOUT: "nothing moved within the timeout of {timeout:g} s",
    Ended.DEAD: "its process has ended",
    Ended.FAILED: "it has failed because of rank {blamed}",
    Ended.GONE: "it has destroyed its process group",
    Ended.CORRUPT: "its ring holds invalid data",
}


class Done:
    """A send that has ended at once."""

    def wait(self) -> None:
        return


DONE = Done()


class Transfer:
    """A send, or a receive into memory of the caller."""

    __slots__ = ("data", "end", "ended", "handle", "nbytes", "peer", "receives")

    def __init__(
        self,
        end: Shm,
        handle: int,
        data: torch.Tensor | None,
        nbytes: int,
        peer: int,
        receives: bool,
    ) -> None:
        self.end = end
        self.handle = handle
        self.data = data  # in use by any of the rank's threads until the wait returns
        self.nbytes = nbytes
        self.peer = peer
        self.receives = receives
        self.ended = False

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


class ShmLoan:
    """A receive that borrows its message; see `protocol.Loan`."""

    __slots__ = ("operation",)

    def __init__(self, operation: Transfer) -> None:
        self.operation = operation

    def wait(self) -> torch.Tensor:
        o = self.operation
        o.wait()
        library = o.end.library
        address = library.shm_message(o.handle)
        if not address:
            raise o._failed(f"no memory for a message of {o.nbytes} bytes", o.end.rank)
        copied = library.shm_copy(o.handle)
        owner = shm_store.Copy(library, address) if copied else o.end.lent_from[o.peer]
        return shm_store.view(address, o.nbytes, owner)

    def give_back(self) -> None:
        handle, self.operation.handle = self.operation.handle, 0
        if handle:
            self.operation.end.library.shm_give_back(self.operation.end.handle, handle)
