"""A schedule: a graph's tasks in stages, for links that keep an order and know no tags (NCCL).

There, sends and receives between two ranks match in the order in which each end issues them, those
that are issued together, as a *batch*, hold up none of each other, and a batch begins when the one
before it has ended. So ranks must cut their messages into batches alike.

Each message has a *wave*, which both ends compute alike: segment + STRIDE * hop. A hop, which an
algorithm gives (see gradwire.algorithms.protocol), is higher than those of all messages on which
the message depends. A rank's batches are its messages by wave, ordered within a batch by what both
ends know. Then

- a message and its other end are in batches of one wave, and the lowest wave that has not ended
  anywhere waits for nothing: nobody waits for ever;
- what a message brings in wave w is needed by no message before wave w + STRIDE. So the kernels of
  stage w wait for the batches up to wave w - STRIDE alone, and run beside the batch in between: the
  kernels of one segment beside the messages of another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.engine.graph import Graph, Kind

STRIDE = 2

Hop = Callable[[str, int, int, int], int]  # of a message: role, chunk, sender, receiver


@dataclass(frozen=True)
class Wave:
    """Kernels to run, then a batch of messages to post.

    Attributes:
        ended: how many batches, counted from the first, must have ended before.
        kernels: tasks, in the order of the graph.
        messages: sends and receives, posted together; those between two given ranks stand in the
            same order on both. None: there is no batch.
    """

    ended: int
    kernels: tuple[int, ...]
    messages: tuple[int, ...]


def lower(graph: Graph, rank: int, hop: Hop) -> tuple[Wave, ...]:
    """The schedule of `rank`, whose graph this is.

    An `after` that orders two messages, so as to spare a link, has no say: waves order them.
    """
    tasks = range(len(graph))
    waves = [_wave(graph, task, rank, hop) if graph.peer[task] >= 0 else -1 for task in tasks]
    ends: list[int] = []  # the first wave at which a task has ended
    sends = [t for t in reversed(tasks) if graph.kind[t] is Kind.SEND]
    sent = {buffer: waves[t] for t in sends for buffer in graph.reads[t]}
    kernels: dict[int, list[int]] = {}
    messages: dict[int, list[int]] = {}
    for task in tasks:
        is_kernel = graph.peer[task] < 0
        needs = [ends[graph.writer[buffer]] for buffer in graph.reads[task]]
        needs += [ends[t] for t in graph.after[task] if is_kernel or graph.peer[t] < 0]
        earliest = max(needs, default=0)
        if is_kernel:
            # What needs nothing could come at once, but then other segments would wait for it.
            due = [sent[b] for b in graph.writes[task] if b in sent]
            waves[task] = earliest if needs else min(due, default=graph.segment[task])
            ends.append(waves[task])
            kernels.setdefault(waves[task], []).append(task)
        else:
            assert waves[task] >= earliest, (
                f"{graph.describe(task)}: its hop is not above what it depends on"
            )
            ends.append(waves[task] + STRIDE)
            messages.setdefault(waves[task], []).append(task)
    free: dict[int, int] = {}
    for task, reads in enumerate(graph.reads):
        for buffer in reads:
            free[buffer] = max(free.get(buffer, 0), ends[task])
    for task, earlier in enumerate(graph.reuses):
        assert free.get(earlier, 0) <= waves[task], (
            f"{graph.describe(task)} takes memory that has not been sent by then"
        )

    def order(task: int) -> tuple[int, int, int]:
        """The same on both ends."""
        return *_ends(graph, task, rank), graph.slot[task]

    stages = []
    posted = sorted(messages)
    for wave in sorted({*kernels, *messages}):
        ended = bisect_right(posted, wave - STRIDE)
        batch = sorted(messages.get(wave, ()), key=order)
        stages.append(Wave(ended, tuple(kernels.get(wave, ())), tuple(batch)))
    return tuple(stages)


def _wave(graph: Graph, task: int, rank: int, hop: Hop) -> int:
    b, ends = graph.message(task)[0], _ends(graph, task, rank)
    late = hop(graph.buffer_role[b], graph.buffer_chunk[b], *ends)
    return graph.segment[task] + STRIDE * late


def _ends(graph: Graph, task: int, rank: int) -> tuple[int, int]:
    """Who sends a message, to whom."""
    peer = graph.peer[task]
    return (rank, peer) if graph.kind[task] is Kind.SEND else (peer, rank)
