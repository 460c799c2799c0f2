"""A graph: tasks in an algorithm's order, with dependencies found from their buffers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gradwire.engine.task import Buffer, Kind, Task


class Graph:
    """The tasks of one collective on one rank.

    A task depends on the tasks that write what it reads, and on those that it names in `after`;
    algorithms state dataflow, nothing else. The order of the list is the order in which ready tasks
    start and in which receives are awaited, so an algorithm lists its tasks in the order it expects
    them to become ready. That order must be one for all ranks: a message that is listed later on
    one rank must not be needed for one that is listed earlier on another.

    Attributes:
        tasks: the vertices.
        dependents: for each task, the indices of the tasks that wait for it.
        waits: for each task, how many tasks it waits for.
        buffers: every buffer, in order of first mention.
        opening: what can begin at once, step by step: receives to post, and then a source, a task
            that waits for nothing (None: there are no more). Receives keep the list's order. A
            transport that needs both ends ready wants them posted early, yet posting takes time
            that the first source should not wait for; so each source has its share before it.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tuple(tasks)
        writer: dict[Buffer, int] = {}
        for index, task in enumerate(self.tasks):
            for buffer in task.writes:
                assert buffer not in writer, f"{buffer} is written by two tasks"
                writer[buffer] = index
        index_of = {task: index for index, task in enumerate(self.tasks)}
        assert len(index_of) == len(self.tasks), "a task is listed twice"
        dependents: list[list[int]] = [[] for _ in self.tasks]
        waits = [0] * len(self.tasks)
        for index, task in enumerate(self.tasks):
            sources = {writer[buffer] for buffer in task.reads}
            sources.update(index_of[earlier] for earlier in task.after)
            for source in sorted(sources):
                assert source < index, f"{task} is listed before the task whose result it reads"
                dependents[source].append(index)
                waits[index] += 1
        self.dependents = tuple(tuple(d) for d in dependents)
        self.waits = tuple(waits)
        self.opening = _opening(self.tasks, self.waits)
        self.buffers = tuple(dict.fromkeys(b for t in self.tasks for b in (*t.writes, *t.reads)))

    def sent(self) -> list[Buffer]:
        """The buffer of every send, in order; law 5 counts their bytes."""
        return [task.reads[0] for task in self.tasks if task.kind is Kind.SEND]


def _opening(
    tasks: Sequence[Task], waits: Sequence[int]
) -> tuple[tuple[tuple[int, ...], int | None], ...]:
    receives = [index for index, task in enumerate(tasks) if task.kind is Kind.RECV]
    sources = [i for i, task in enumerate(tasks) if task.kind is not Kind.RECV and not waits[i]]
    if not sources:
        return ((tuple(receives), None),)
    cuts = [len(receives) * place // len(sources) for place in range(len(sources) + 1)]
    shares = [tuple(receives[begin:end]) for begin, end in pairwise(cuts)]
    return tuple(zip(shares, sources, strict=True))
