"""Where the messages of a graph lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Container

from gradwire.engine import Graph, Kind
from gradwire.engine.message import align

# From so many bytes on a message is read where its sender has put it. Below, copying it through a
# ring, which stays in the cache, costs less than giving it back.
BORROWED_BYTES = 1 << 18


def borrowed(
    graph: Graph, message_bytes: Callable[[int], int], lenders: frozenset[int]
) -> dict[int, int]:
    """Bytes of the messages that can be read where they lie: those that only kernels read.

    A send of such a message ends with its last reader. So there are none in a graph where tasks
    wait for sends: a merge would wait for a message whose sender waits for that merge.
    """
    if any(graph.kind[earlier] is Kind.SEND for after in graph.after for earlier in after):
        return {}
    sent = set(graph.sent())
    came = [
        graph.message(task)
        for task, peer in enumerate(graph.peer)
        if peer in lenders and graph.kind[task] is Kind.RECV
    ]
    sizes = {buffer: message_bytes(buffer) for buffer in came if buffer not in sent}
    return {buffer: size for buffer, size in sizes.items() if size >= BORROWED_BYTES}


def place(
    graph: Graph, message_bytes: Callable[[int], int], elsewhere: Container[int] = ()
) -> tuple[dict[int, int], int]:
    """(where each message begins, where all end), in bytes, aligned; but for those `elsewhere`.

    What a merge sums stands side by side, in its order: a GPU's kernels need equal distances.
    A message that may take another's memory does.
    """
    offsets: dict[int, int] = {}
    end = 0
    reused = {
        graph.message(task): earlier
        for task, earlier in enumerate(graph.reuses)
        if earlier >= 0 and graph.message(task) not in elsewhere
    }
    merged = [
        b for task, kind in enumerate(graph.kind) if kind is Kind.MERGE for b in graph.reads[task]
    ]
    written = [b for writes in graph.writes for b in writes]
    for buffer in (*merged, *written):
        if buffer not in offsets and buffer not in reused and buffer not in elsewhere:
            offsets[buffer] = end
            end += align(message_bytes(buffer))
    for buffer, earlier in reused.items():
        assert buffer not in offsets, "what is merged has a place of its own"
        assert message_bytes(buffer) <= message_bytes(earlier)
        offsets[buffer] = offsets[earlier]
    return offsets, end
