"""What a link is: point-to-point messages that match by the order in which they are posted.

NCCL's are so. They have no tags, and nobody on the host learns when they end: a stream does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from gradwire.transport.protocol import Pending


class Posting(NamedTuple):
    """One message of a batch: `memory` (uint8, contiguous, on the link's device) to be filled, or
    to be sent."""

    memory: torch.Tensor
    peer: int
    incoming: bool


class OrderedLink(Protocol):
    """An implementer's duties:

    - Batches are carried out in the order in which they are posted. The messages of one hold up
      none of each other; those between two ranks match in their order on both.
    - `post` returns at once. A batch begins when all that the current stream holds has ended.
    - `wait` of what `post` returns makes the current stream wait for the batch; on the CPU, which
      has no streams, the caller, for at most `timeout` seconds.
    - Failures that the host learns of are TransportErrors, as of a Transport.

    Attributes:
        rank, world_size: as in torch, within the group.
    """

    rank: int
    world_size: int

    def post(self, batch: Sequence[Posting]) -> Pending:
        """Start to send and receive; the memory is the link's until the batch has ended."""
        ...

    def fail(self, peer: int) -> None:
        """Tell the other ranks, as far as they can be reached, that `peer` has failed."""
        ...
