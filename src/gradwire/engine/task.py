"""The vocabulary of the engine: tasks, and the buffers through which they depend on each other.

A collective is a graph of five kinds of task (HiPress 3.1, CaSync's primitives):

    encode   values of some chunks -> their payloads
    merge    own values + the payloads of all peers -> the payload of their sum, and the result
    decode   payload -> values
    send     payload -> a peer
    recv     a peer -> payload

`decode` and `merge` are one kernel where that saves a pass over memory: `merge` decodes, sums in
the order of ranks, and encodes again, block by block.
"""

from __future__ import annotations

from dataclasses import dataclass
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
        chunk: the rank whose share of the values this is.
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
        reads: buffers it needs; their writers come first.
        writes: buffers it fills.
        peer: the other rank of a send or recv, else None.
    """

    kind: Kind
    segment: int
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    peer: int | None = None

    def __str__(self) -> str:
        direction = {Kind.SEND: " to rank", Kind.RECV: " from rank"}.get(self.kind, "")
        peer = "" if self.peer is None else f" {self.peer}"
        return f"{self.kind.value}{direction}{peer}, segment {self.segment}"
