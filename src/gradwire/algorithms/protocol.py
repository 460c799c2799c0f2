"""The algorithm protocol: functions of (rank, world_size, sizes), in a module or an object.

`sizes[segment][chunk]` is the payload of a chunk within a segment in bytes, without its header; 0
means that it is empty. It is the same on every rank. A *segment* is a pipeline unit, a *chunk* is a
share of the values; the algorithm determines the number of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gradwire.engine import HEADER_BYTES, Graph

Sizes = Sequence[Sequence[int]]


class Algorithm(Protocol):
    """An implementer's duties:

    - All functions are pure, and the same on every rank.
    - `build` lists the receives of all ranks in consistent orders, so that ranks cannot deadlock: a
      step's receives before those of the next step, segments in order within a step.
    - Every rank ends with the output of the final merge: the rank that computes it keeps what the
      payload decodes to.
    - Every value is merged with the values of each rank exactly once.
    - A buffer's source is the rank that encodes it, on every rank that has it: decoders may need
      the random numbers of that rank.
    """

    @property
    def ROLES(self) -> tuple[str, ...]:
        """The roles of all buffers; role, segment and chunk identify a message on its link."""
        ...

    def chunks(self, world_size: int) -> int:
        """The number of chunks into which the values are cut."""
        ...

    def rounds(self, world_size: int) -> int:
        """The number of messages on the longest dependency chain."""
        ...

    def build(self, rank: int, world_size: int, sizes: Sizes) -> Graph:
        """The graph of `rank`."""
        ...

    def hop(self, role: str, chunk: int, sender: int, receiver: int, world_size: int) -> int:
        """A message's position in the order of dependencies: 0 or more, and greater than the hop of
        every message, on any rank, on which it depends. Both ends compute it from these arguments.

        It orders messages on links without tags (engine/schedule.py).
        """
        ...

    def wire_bytes(self, rank: int, world_size: int, sizes: Sizes) -> int:
        """Bytes that `rank` sends, headers included."""
        ...

    def seconds(self, world_size: int, payload_bytes: float, alpha: float, beta: float) -> float:
        """Expected time (s) for `payload_bytes` in total.

        `alpha`: latency per message (s); `beta`: seconds per byte on a rank's link, which is full
        duplex.
        """
        ...


def message(nbytes: int) -> int:
    """Bytes of a message with a payload of `nbytes`; an empty one is not sent."""
    return nbytes + HEADER_BYTES if nbytes else 0
