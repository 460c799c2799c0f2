"""Links: point-to-point messages that match by the order in which they are posted, as NCCL's do.

They have no tags, and complete on a stream rather than on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from gradwire.transport.protocol import Pending


class Posting(NamedTuple):
    """One message of a batch: `memory` (uint8, contiguous, on the link's device) to receive into,
    or to send."""

    memory: torch.Tensor
    peer: int
    incoming: bool


class OrderedLink(Protocol):
    """An implementer's duties:

    - Batches run in the order in which they are posted. The messages of a batch do not block each
      other; those between two ranks match in their order on both.
    - `post` does not block. A batch begins when all earlier work on the current stream has ended.
    - `wait` on what `post` returns makes the current stream wait for the batch; on the CPU, which
      has no streams, it blocks the caller, for at most `timeout` seconds.
    - Failures that the host notices are TransportErrors, as of a Transport.

    Attributes:
        rank, world_size: as in torch, within the group.
    """

    rank: int
    world_size: int

    def post(self, batch: Sequence[Posting]) -> Pending:
        """Start to send and receive; the memory is in use until the batch has ended."""
        ...

    def fail(self, peer: int) -> None:
        """Tell the other ranks, where they can be reached, that `peer` has failed."""
        ...

    def interrupt(self) -> None:
        """End what blocks this host in `wait`, now and later: the group has broken."""
        ...
