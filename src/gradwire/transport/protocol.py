"""What a transport is."""

from __future__ import annotations

from typing import Protocol

import torch


class Pending(Protocol):
    """A send or receive under way. The transport keeps its buffer alive until `wait` returns."""

    def wait(self) -> None:
        """Block until the buffer may be used again.

        Raises:
            TransportError: the peer or the link failed, or the transport's timeout passed.
        """


class Transport(Protocol):
    """Point-to-point delivery within one group of ranks.

    An implementer's duties:
    - `isend` and `irecv` return at once, may be called from any thread, and match by (peer, tag);
      the two ends name the same number of bytes (callers compare plans before they send).
    - Messages between two ranks with different tags may be in flight together, in any number.
    - Every wait ends within `timeout` seconds: in delivery, or in a TransportError whose `peer`
      is the rank that failed, as well as this rank can know it.
    - After a TransportError the transport is broken; later calls raise the same error.

    Attributes:
        rank, world_size: as in torch, within the group.
        timeout: seconds that a wait may last.
        in_memory: whether all messages of this rank stay in the memory of its machine.
        shared_bytes: of memory shared with other processes.
    """

    rank: int
    world_size: int
    timeout: float
    in_memory: bool
    shared_bytes: int

    def isend(self, data: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start sending `data` (uint8, contiguous, on the CPU) to `peer`."""
        ...

    def irecv(self, data: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start receiving `data.numel()` bytes from `peer` into `data`."""
        ...

    def fail(self, peer: int) -> None:
        """Tell the other ranks, as far as they can be reached, that `peer` has failed."""
        ...

    def close(self) -> None:
        """End what serves this transport; it is not used afterwards."""
        ...
