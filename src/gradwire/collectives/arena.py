"""Where the messages of a graph lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Container

from gradwire.engine import Buffer, Graph, Kind
from gradwire.engine.message import align

# From so many bytes on a message is read where its sender has put it. Below, copying it through a
# ring, which stays in the cache, costs less than giving it back.
BORROWED_BYTES = 1 << 18


def borrowed(
    graph: Graph, message_bytes: Callable[[Buffer], int], lenders: frozenset[int]
) -> dict[Buffer, int]:
    """Bytes of the messages that can be read where they lie: those that only kernels read.

    A send of such a message ends with its last reader. So there are none in a graph where tasks
    wait for sends: a merge would wait for a message whose sender waits for that merge.
    """
    if any(earlier.kind is Kind.SEND for task in graph.tasks for earlier in task.after):
        return {}
    sent = set(graph.sent())
    came = [t.writes[0] for t in graph.tasks if t.kind is Kind.RECV and t.peer in lenders]
    sizes = {buffer: message_bytes(buffer) for buffer in came if buffer not in sent}
    return {buffer: size for buffer, size in sizes.items() if size >= BORROWED_BYTES}


def place(
    graph: Graph, message_bytes: Callable[[Buffer], int], elsewhere: Container[Buffer] = ()
) -> tuple[dict[Buffer, int], int]:
    """(where each message begins, where all end), in bytes, aligned; but for those `elsewhere`.

    What a merge sums stands side by side, in its order: a GPU's kernels need equal distances.
    A message that may take another's memory does.
    """
    offsets: dict[Buffer, int] = {}
    end = 0
    reused = {
        task.writes[0]: task.reuses
        for task in graph.tasks
        if task.reuses is not None and task.writes[0] not in elsewhere
    }
    merged = [b for task in graph.tasks if task.kind is Kind.MERGE for b in task.reads]
    for buffer in (*merged, *graph.buffers):
        if buffer not in offsets and buffer not in reused and buffer not in elsewhere:
            offsets[buffer] = end
            end += align(message_bytes(buffer))
    for buffer, earlier in reused.items():
        assert buffer not in offsets, f"{buffer} is merged, it has a place of its own"
        assert message_bytes(buffer) <= message_bytes(earlier)
        offsets[buffer] = offsets[earlier]
    return offsets, end
