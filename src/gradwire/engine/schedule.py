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

from collections.abc import Callable
from dataclasses import dataclass

from gradwire.engine.graph import Graph
from gradwire.engine.task import Buffer, Kind, Task

STRIDE = 2

Hop = Callable[[Buffer, int, int], int]  # of a buffer from a sender to a receiver


@dataclass(frozen=True)
class Stage:
    """Kernels to run, then a batch of messages to post.

    Attributes:
        ended: how many batches, counted from the first, must have ended before.
        kernels: in the order of the graph.
        messages: sends and receives, posted together; those between two given ranks stand in the
            same order on both. None: there is no batch.
    """

    ended: int
    kernels: tuple[Task, ...]
    messages: tuple[Task, ...]


def lower(graph: Graph, rank: int, hop: Hop) -> tuple[Stage, ...]:
    """The schedule of `rank`, whose graph this is.

    An `after` that orders two messages, so as to spare a link, has no say: waves order them.
    """
    writer = {buffer: task for task in graph.tasks for buffer in task.writes}
    waves = {
        task: task.segment + STRIDE * hop(*_letter(task, rank))
        for task in graph.tasks
        if task.peer is not None
    }
    sent = {b: waves[t] for t in reversed(graph.tasks) if t.kind is Kind.SEND for b in t.reads}
    kernels: dict[int, list[Task]] = {}
    messages: dict[int, list[Task]] = {}
    for task in graph.tasks:
        needs = [writer[buffer] for buffer in task.reads]
        needs += [t for t in task.after if task.peer is None or t.peer is None]
        earliest = max((_ended(need, waves) for need in needs), default=0)
        if task.peer is None:
            # What needs nothing could come at once, but then other segments would wait for it.
            due = min((sent[b] for b in task.writes if b in sent), default=task.segment)
            waves[task] = earliest if needs else due
            kernels.setdefault(waves[task], []).append(task)
        else:
            assert waves[task] >= earliest, f"{task}: its hop is not above what it depends on"
            messages.setdefault(waves[task], []).append(task)
    free: dict[Buffer, int] = {}
    for task in graph.tasks:
        for buffer in task.reads:
            free[buffer] = max(free.get(buffer, 0), _ended(task, waves))
    for task in graph.tasks:
        early = task.reuses is None or free.get(task.reuses, 0) <= waves[task]
        assert early, f"{task} takes memory that has not been sent by then"

    stages = []
    posted = sorted(messages)
    for wave in sorted({*kernels, *messages}):
        batch = sorted(messages.get(wave, ()), key=lambda task: _order(task, rank))
        ended = sum(earlier <= wave - STRIDE for earlier in posted)
        stages.append(Stage(ended, tuple(kernels.get(wave, ())), tuple(batch)))
    return tuple(stages)


def _ended(task: Task, waves: dict[Task, int]) -> int:
    """The first wave at which `task` has ended."""
    return waves[task] + (STRIDE if task.peer is not None else 0)


def _letter(task: Task, rank: int) -> tuple[Buffer, int, int]:
    """What is sent, by whom, to whom."""
    assert task.peer is not None
    if task.kind is Kind.SEND:
        return task.reads[0], rank, task.peer
    return task.writes[0], task.peer, rank


def _order(task: Task, rank: int) -> tuple[object, ...]:
    """The same on both ends; a buffer's role, segment and chunk are one message a link."""
    buffer, sender, receiver = _letter(task, rank)
    return sender, receiver, buffer.role, buffer.segment, buffer.chunk
