"""The transport protocol."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from gradwire.transport.shm_store import Store


class Pending(Protocol):
    """A send or receive in flight. The transport keeps its buffer alive until `wait` returns."""

    def wait(self) -> None:
        """Block until the buffer may be used again.

        Raises:
            TransportError: the peer or the link failed, or the transport's timeout passed.
        """


class Loan(Protocol):
    """A receive in flight that reads its message in the sender's memory."""

    def wait(self) -> torch.Tensor:
        """The message (uint8), in place: it does not change until it is given back.

        Raises:
            TransportError: as `Pending.wait`.
        """
        ...

    def give_back(self) -> None:
        """End the loan; called once, after `wait`. The peer's send ends only then."""
        ...


class Transport(Protocol):
    """Point-to-point delivery within one group of ranks.

    An implementer's duties:
    - `isend` and `irecv` do not block, are thread-safe, and match by (peer, tag). A message may be
      shorter than its receive, never longer (callers compare plans before they send); in shared
      memory both ends give the same number of bytes.
    - Any number of messages with different tags may be in flight between two ranks; messages with
      the same tag are delivered in order.
    - Every wait ends within `timeout` seconds: with delivery, or with a TransportError whose `peer`
      is the rank that failed, as far as this rank knows.
    - After a TransportError the transport is broken; later calls raise the same error.

    Attributes:
        rank, world_size: as in torch, within the group.
        timeout: seconds that a wait may last.
        in_memory: whether all messages of this rank stay in the memory of its machine.
        shared_bytes: size of memory shared with other processes, including what was taken from
            `store`.
        lent_bytes: total bytes in use, so far, of messages that peers have read in place.
        reached: the peers with which this rank shares memory; the relation is symmetric.
        lenders: the peers among them whose messages can be borrowed.
        store: memory for messages that peers can borrow; None if no peer can.
        board: the torch.distributed store that the group's ranks share.
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

        `in_use`: how many bytes count in `lent_bytes` if the message is lent; None: all.
        """
        ...

    def irecv(self, data: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start receiving a message from `peer` into `data` (uint8), or its beginning."""
        ...

    def borrow(self, nbytes: int, peer: int, tag: int) -> Loan:
        """Start receiving `nbytes` (1 or more) from `peer`, one of `lenders`, in place."""
        ...

    def fail(self, peer: int) -> None:
        """Tell the other ranks, where they can be reached, that `peer` has failed."""
        ...

    def longest_wait(self) -> tuple[float, int] | None:
        """Seconds and peer of the longest current wait, or None."""
        ...

    def close(self) -> None:
        """Release all resources; the transport cannot be used afterwards."""
        ...
