"""The vocabulary of the engine: tasks, and the buffers through which they depend on each other.

A collective is a graph of five kinds of task (HiPress 3.1, CaSync's primitives):

    encode   values of some chunks -> their payloads
    merge    payloads, with or without own values -> their sum: as values, or as a payload and what
             that decodes to
    decode   payload -> values
    send     payload -> a peer
    recv     a peer -> payload

A merge is one kernel: it decodes, sums in the order in which it names its payloads, and encodes
again, block by block. It replaces the values by the sum, or by what the sum's payload decodes to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    ENCODE = "encode"
    DECODE = "decode"
    MERGE = "merge"
    SEND = "send"
    RECV = "recv"


@dataclass(frozen=True, order=True)
class Buffer:
    """One message in memory: the payload of one chunk of one segment, with its header.

    Attributes:
        role: what the payload holds, in the algorithm's own words ("contribution", "result").
        segment: the pipeline unit.
        chunk: the share of the values that it holds.
        source: the rank that encoded it.
    """

    role: str
    segment: int
    chunk: int
    source: int


@dataclass(frozen=True)
class Task:
    """A vertex of a graph.

    Attributes:
        kind: what is done.
        segment: the pipeline unit it belongs to.
        reads: buffers it needs; their writers come first. A merge sums them in this order; they
            are payloads of one chunk.
        writes: buffers it fills. A merge that writes none leaves the sum in the values.
        peer: the other rank of a send or recv, else None.
        own: of a merge: the position of the own values in the sum; None sums payloads alone.
        final: of a merge: whether it makes the result, so that an average is divided here.
        after: tasks that must end first though no buffer says so: they change the values, or use
            the link. A send ends when its transport says so: if its message is read where it lies,
            with the last reader.
        reuses: of a recv: a buffer, read by sends alone, whose memory the message may take, since
            no rank sends the message before that buffer has reached all its receivers.
    """

    kind: Kind
    segment: int
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    peer: int | None = None
    own: int | None = None
    final: bool = False
    after: tuple[Task, ...] = field(default=(), compare=False)
    reuses: Buffer | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        encodes = self.kind is Kind.MERGE and self.writes
        # Its error would have no residual to go to: own values bring theirs.
        assert not encodes or self.own is not None, f"{self} encodes a sum without own values"

    def __str__(self) -> str:
        direction = {Kind.SEND: " to rank", Kind.RECV: " from rank"}.get(self.kind, "")
        peer = "" if self.peer is None else f" {self.peer}"
        return f"{self.kind.value}{direction}{peer}, segment {self.segment}"
