"""A schedule: a graph's tasks in stages, for links with in-order delivery and no tags (NCCL).

On such a link, sends and receives between two ranks match in the order in which each end issues
them. Messages that are issued together, as a *batch*, do not block each other, and a batch begins
when the previous one has ended. So all ranks must form the same batches.

Each message has a *wave*, which both ends compute alike: segment + STRIDE * hop. The algorithm
gives the hop (see gradwire.algorithms.protocol), which is higher than the hops of all messages on
which the message depends. A rank's batches are its messages by wave; within a batch, the order
follows from what both ends know. Then

- both ends of a message are in batches of the same wave, and the lowest unfinished wave of all
  ranks waits for nothing: there is no deadlock;
- no message before wave w + STRIDE needs what a message brings in wave w. So the kernels of stage w
  wait only for the batches up to wave w - STRIDE, and overlap with the batch in between: the
  kernels of one segment with the messages of another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.engine.graph import Graph, Kind

STRIDE = 2

Hop = Callable[[str, int, int, int], int]  # (role, chunk, sender, receiver) of a message


@dataclass(frozen=True)
class Wave:
    """Kernels to run, then a batch of messages to post.

    Attributes:
        ended: how many batches, counted from the first, must have ended before.
        kernels: tasks, in the order of the graph.
        messages: sends and receives, posted together, in the same order on both ends; empty: there
            is no batch.
    """

    ended: int
    kernels: tuple[int, ...]
    messages: tuple[int, ...]


def lower(graph: Graph, rank: int, hop: Hop) -> tuple[Wave, ...]:
    """The schedule of `rank`, whose graph this is.

    An `after` between two messages, which is there to spare a link, is ignored: waves order them.
    """
    tasks = range(len(graph))
    waves = [_wave(graph, task, rank, hop) if graph.peer[task] >= 0 else -1 for task in tasks]
    ends: list[int] = []  # per task, the first wave by which it has ended
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
            # A task without needs could run at once, but would delay the other segments.
            due = [sent[b] for b in graph.writes[task] if b in sent]
            waves[task] = earliest if needs else min(due, default=graph.segment[task])
            ends.append(waves[task])
            kernels.setdefault(waves[task], []).append(task)
        else:
            assert waves[task] >= earliest, (
                f"{graph.describe(task)}: its hop is not above the hops that it depends on"
            )
            ends.append(waves[task] + STRIDE)
            messages.setdefault(waves[task], []).append(task)
    free: dict[int, int] = {}
    for task, reads in enumerate(graph.reads):
        for buffer in reads:
            free[buffer] = max(free.get(buffer, 0), ends[task])
    for task, earlier in enumerate(graph.reuses):
        assert free.get(earlier, 0) <= waves[task], (
            f"{graph.describe(task)}: reuses the memory of a message that is not sent by then"
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
    """(sender, receiver) of a message."""
    peer = graph.peer[task]
    return (rank, peer) if graph.kind[task] is Kind.SEND else (peer, rank)
