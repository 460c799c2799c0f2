"""Where the messages of a graph lie in memory."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.engine import Graph, Kind
from gradwire.engine.message import align

# From so many bytes on a message is read where its sender has put it. Below, copying it through a
# ring, which stays in the cache, costs less than giving it back.
BORROWED_BYTES = 1 << 18


def borrowed(graph: Graph, nbytes: Sequence[int], lenders: frozenset[int]) -> list[bool]:
    """Whether a buffer's message can be read where it lies: that of a large one that only kernels
    read.

    A send of such a message ends with its last reader. So there are none in a graph where tasks
    wait for sends: a merge would wait for a message whose sender waits for that merge.
    """
    found = [False] * len(nbytes)
    if any(graph.kind[earlier] is Kind.SEND for after in graph.after for earlier in after):
        return found
    for task, peer in enumerate(graph.peer):
        if peer in lenders and graph.kind[task] is Kind.RECV:
            buffer = graph.message(task)
            found[buffer] = nbytes[buffer] >= BORROWED_BYTES
    for buffer in graph.sent():
        found[buffer] = False
    return found


def place(graph: Graph, nbytes: Sequence[int], elsewhere: Sequence[bool]) -> tuple[list[int], int]:
    """(where each buffer begins, where all end), in bytes, aligned.

    What a merge sums stands side by side, in its order: a GPU's kernels need equal distances.
    A message that may take another's memory does. One that lies `elsewhere` begins at 0.
    """
    offsets = [-1] * len(nbytes)
    end = 0
    reused: dict[int, int] = {}
    for task, earlier in enumerate(graph.reuses):
        if earlier >= 0 and not elsewhere[graph.message(task)]:
            reused[graph.message(task)] = earlier
    merged = [graph.reads[task] for task, kind in enumerate(graph.kind) if kind is Kind.MERGE]
    for buffers in (*merged, *graph.writes):
        for buffer in buffers:
            if elsewhere[buffer]:
                offsets[buffer] = 0
            elif offsets[buffer] < 0 and buffer not in reused:
                offsets[buffer] = end
                end += align(nbytes[buffer])
    for buffer, earlier in reused.items():
        assert offsets[buffer] < 0, "what is merged has a place of its own"
        assert nbytes[buffer] <= nbytes[earlier]
        offsets[buffer] = offsets[earlier]
    return offsets, end
