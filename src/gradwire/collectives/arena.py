"""Where the messages of a graph lie in memory."""

from __future__ import annotations

from collections.abc import Callable

from gradwire.engine import Buffer, Graph, Kind
from gradwire.engine.message import align


def place(graph: Graph, message_bytes: Callable[[Buffer], int]) -> tuple[dict[Buffer, int], int]:
    """(where each message begins, where all end), in bytes, aligned.

    What a merge sums stands side by side, in its order: a GPU's kernels need equal distances.
    A message that may take another's memory does.
    """
    offsets: dict[Buffer, int] = {}
    end = 0
    reused = {task.writes[0]: task.reuses for task in graph.tasks if task.reuses is not None}
    merged = [b for task in graph.tasks if task.kind is Kind.MERGE for b in task.reads]
    for buffer in (*merged, *graph.buffers):
        if buffer not in offsets and buffer not in reused:
            offsets[buffer] = end
            end += align(message_bytes(buffer))
    for buffer, earlier in reused.items():
        assert buffer not in offsets, f"{buffer} is merged, it has a place of its own"
        assert message_bytes(buffer) <= message_bytes(earlier)
        offsets[buffer] = offsets[earlier]
    return offsets, end
