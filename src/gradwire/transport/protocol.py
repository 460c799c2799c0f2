"""What a transport is."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from gradwire.transport.shm_store import Store


class Pending(Protocol):
    """A send or receive under way. The transport keeps its buffer alive until `wait` returns."""

    def wait(self) -> None:
        """Block until the buffer may be used again.

        Raises:
            TransportError: the peer or the link failed, or the transport's timeout passed.
        """


class Loan(Protocol):
    """A receive under way that borrows its message."""

    def wait(self) -> torch.Tensor:
        """The message (uint8), where it lies: it does not change until it is given back.

        Raises:
            TransportError: as `Pending.wait`.
        """
        ...

    def give_back(self) -> None:
        """It is read no more; once, after `wait`. Only then the peer's send ends."""
        ...


class Transport(Protocol):
    """Point-to-point delivery within one group of ranks.

    An implementer's duties:
    - `isend` and `irecv` return at once, may be called from any thread, and match by (peer, tag). A
      message may be shorter than its receive, never longer (callers compare plans before they
      send); where memory is shared both ends name the same number of bytes.
    - Messages between two ranks with different tags may be in flight together, in any number; those
      with one tag are delivered in order.
    - Every wait ends within `timeout` seconds: in delivery, or in a TransportError whose `peer`
      is the rank that failed, as well as this rank can know it.
    - After a TransportError the transport is broken; later calls raise the same error.

    Attributes:
        rank, world_size: as in torch, within the group.
        timeout: seconds that a wait may last.
        in_memory: whether all messages of this rank stay in the memory of its machine.
        shared_bytes: of memory shared with other processes, what was taken from `store` included.
        lent_bytes: in use, of messages that peers have read where they lay, so far.
        reached: the peers with which memory is shared: each of them has this rank among its own.
        lenders: those of them whose messages can be borrowed.
        store: memory for messages that peers can borrow; None if none can.
        board: a store in torch's sense, which the group's ranks share.
    """

    rank: int
    world_size: int
    timeout: float
    in_memory: bool

    @property
    def board(self) -> dist.Store: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def lent_bytes(self) -> int: ...
    @property
    def reached(self) -> frozenset[int]: ...
    @property
    def lenders(self) -> frozenset[int]: ...
    @property
    def store(self) -> Store | None: ...

    def isend(self, data: torch.Tensor, peer: int, tag: int, in_use: int | None = None) -> Pending:
        """Start sending `data` (uint8, contiguous, on the CPU) to `peer`.

        `in_use`: as how many bytes it counts if it is lent; None: all.
        """
        ...

    def irecv(self, data: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start receiving a message from `peer` into `data` (uint8), or its beginning."""
        ...

    def borrow(self, nbytes: int, peer: int, tag: int) -> Loan:
        """Start receiving `nbytes` (1 or more) from `peer`, one of `lenders`, where they lie."""
        ...

    def fail(self, peer: int) -> None:
        """Tell the other ranks, as far as they can be reached, that `peer` has failed."""
        ...

    def longest_wait(self) -> tuple[float, int] | None:
        """Seconds and peer of the longest wait under way, or None."""
        ...

    def close(self) -> None:
        """End what serves this transport; it is not used afterwards."""
        ...
