"""Runs the graphs of all ranks on symbols: what each payload is the sum of, and who waits for whom.

Receives are awaited in the order of the graph, as the executor does; so what would hang there
hangs here too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradwire.algorithms import Algorithm
from gradwire.engine import Buffer, Kind, Task

Sum = Counter[int]  # rank -> how often its values are in it
Letter = tuple[int, int, str, int, int]  # sender, receiver, role, segment, chunk


@dataclass
class Rank:
    """One rank under way.

    Attributes:
        values: (segment, chunk) -> what the values are the sum of.
        maker: (segment, chunk) -> the payload, or payloads, that the values were decoded from.
    """

    number: int
    tasks: tuple[Task, ...]
    waits: list[int]
    values: dict[tuple[int, int], Sum] = field(default_factory=dict)
    maker: dict[tuple[int, int], tuple[Buffer, ...]] = field(default_factory=dict)
    held: dict[Buffer, Sum] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


def run(algorithm: Algorithm, sizes: Sequence[Sequence[int]], world_size: int) -> list[Rank]:
    """Every rank at its end. Fails if ranks wait for each other, or a message meets another."""
    chunks = algorithm.chunks(world_size)
    graphs = [algorithm.build(r, world_size, sizes) for r in range(world_size)]
    ranks = [Rank(r, g.tasks, list(g.waits)) for r, g in enumerate(graphs)]
    for rank in ranks:
        for s, segment in enumerate(sizes):
            for c in range(chunks):
                if segment[c]:
                    rank.values[s, c] = Counter([rank.number])
    mail: dict[Letter, Sum] = {}
    reused = {
        letter_of(rank.number, task): (rank, task.reuses)
        for rank in ranks
        for task in rank.tasks
        if task.reuses is not None
    }
    moved = True
    while moved:
        moved = False
        for rank, graph in zip(ranks, graphs, strict=True):
            awaited = next(
                (i for i, t in enumerate(rank.tasks) if t.kind is Kind.RECV and i not in rank.done),
                None,
            )
            for index, task in enumerate(rank.tasks):
                is_next = task.kind is not Kind.RECV or index == awaited
                if index in rank.done or rank.waits[index] or not is_next:
                    continue
                if task.kind is Kind.SEND and (letter := letter_of(rank.number, task)) in reused:
                    assert_free(*reused[letter], mail)
                if step(rank, task, chunks, mail):
                    rank.done.add(index)
                    moved = True
                    for dependent in graph.dependents[index]:
                        rank.waits[dependent] -= 1
    for rank in ranks:
        left = [str(t) for i, t in enumerate(rank.tasks) if i not in rank.done]
        assert not left, f"rank {rank.number} waits for ever: {left}"
    assert not mail, f"sent and never received: {list(mail)}"
    return ranks


def letter_of(rank: int, task: Task) -> Letter:
    """What both ends of a send or recv call its message."""
    assert task.peer is not None
    buffer = (task.reads or task.writes)[0]
    ends = (rank, task.peer) if task.kind is Kind.SEND else (task.peer, rank)
    return (*ends, buffer.role, buffer.segment, buffer.chunk)


def assert_free(receiver: Rank, buffer: Buffer, mail: dict[Letter, Sum]) -> None:
    """A message is sent into the memory of `buffer`: all of its readers must have ended."""
    for index, task in enumerate(receiver.tasks):
        if buffer in task.reads:
            assert task.kind is Kind.SEND, f"{task} reads what a receive would overwrite"
            assert index in receiver.done, f"{buffer} was not sent yet"
            assert letter_of(receiver.number, task) not in mail, f"{buffer} is still on its way"


def step(rank: Rank, task: Task, chunks: int, mail: dict[Letter, Sum]) -> bool:
    """Do one task; False if its message has not come yet."""
    if task.kind in (Kind.SEND, Kind.RECV):
        buffer = (task.reads or task.writes)[0]
        letter = letter_of(rank.number, task)
        if task.kind is Kind.SEND:
            assert letter not in mail, f"two messages of one tag: {letter}"
            mail[letter] = rank.held[buffer]
            return True
        if letter not in mail:
            return False
        rank.held[buffer] = mail.pop(letter)
        return True
    for place in {(b.segment, b.chunk % chunks) for b in (*task.reads, *task.writes)}:
        buffers = [b for b in task.writes if (b.segment, b.chunk % chunks) == place]
        total = Counter(rank.values[place]) if task.kind is Kind.ENCODE or has_own(task) else Sum()
        for b in task.reads:
            total.update(rank.held[b])
        for b in buffers:
            rank.held[b] = total
        if task.kind is not Kind.ENCODE:
            rank.values[place] = total
            rank.maker[place] = task.writes or task.reads
    return True


def has_own(task: Task) -> bool:
    """Whether a merge takes in the own values."""
    return task.kind is Kind.MERGE and task.own is not None
