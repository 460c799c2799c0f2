"""What an algorithm is: functions of (rank, world_size, sizes), as a module or an object.

`sizes[segment][chunk]` is the payload of a chunk within a segment in bytes, without its header, 0
where it holds nothing; it is the same on every rank. A *segment* is a pipeline unit, a *chunk* a
share of the values; an algorithm says into how many chunks it wants them cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gradwire.engine import HEADER_BYTES, Graph

Sizes = Sequence[Sequence[int]]


class Algorithm(Protocol):
    """An implementer's duties:

    - All functions are pure, and alike on every rank.
    - `build` lists the receives of all ranks in one order, so that none waits for another in a
      circle: a step's receives before those of the next step, segments in order within a step.
    - What a merge made final is what every rank ends with: its maker takes what the payload says.
    - Every value is merged with the values of each rank once.
    """

    @property
    def ROLES(self) -> tuple[str, ...]:
        """The roles of all buffers; a buffer's role, segment and chunk are one message a link."""
        ...

    def chunks(self, world_size: int) -> int:
        """How many chunks the values are cut into."""
        ...

    def rounds(self, world_size: int) -> int:
        """Messages that follow one another on the longest way."""
        ...

    def build(self, rank: int, world_size: int, sizes: Sizes) -> Graph:
        """The graph of `rank`."""
        ...

    def hop(self, role: str, chunk: int, sender: int, receiver: int, world_size: int) -> int:
        """How late a message comes: 0 or more, and more than that of every message, on any rank,
        without which it cannot be sent. Both of its ends compute it from nothing else.

        It puts messages in an order where the transport has none to itself (engine/schedule.py).
        """
        ...

    def wire_bytes(self, rank: int, world_size: int, sizes: Sizes) -> int:
        """Bytes that `rank` sends, headers included."""
        ...

    def seconds(self, world_size: int, payload_bytes: float, alpha: float, beta: float) -> float:
        """Expected time of a payload of so many bytes in all.

        `alpha`: latency of a message (s); `beta`: seconds a byte takes on a rank's link, which
        sends and receives at the same time.
        """
        ...


def message(nbytes: int) -> int:
    """Bytes of a message with a payload of `nbytes`; an empty one is not sent."""
    return nbytes + HEADER_BYTES if nbytes else 0
