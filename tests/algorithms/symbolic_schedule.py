"""Runs the schedules of all ranks on symbols, over links of the strictest kind: a batch begins when
the one before it has ended on that rank, a message moves when both of its ends have begun, and
between two ranks the first that is sent goes to the first that is received.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from symbolic import Rank, letter_of, step

from gradwire.algorithms import Algorithm
from gradwire.engine import Buffer, Kind, Task
from gradwire.engine.schedule import Stage, lower


def schedules(
    algorithm: Algorithm, sizes: Sequence[Sequence[int]], n: int
) -> list[tuple[Stage, ...]]:
    """Of every rank; each checked for itself."""
    found = []
    for rank in range(n):
        graph = algorithm.build(rank, n, sizes)
        stages = lower(graph, rank, lambda *letter: algorithm.hop(*letter, n))
        check_order(graph.tasks, stages)
        found.append(stages)
    return found


def check_order(tasks: Sequence[Task], stages: Sequence[Stage]) -> None:
    """Each task is there once, and whatever it needs has ended before it begins."""
    listed = [t for s in stages for t in (*s.kernels, *s.messages)]
    assert sorted(map(id, listed)) == sorted(map(id, tasks))
    # Within a stage, kernels stand before messages.
    position = {t: i for i, t in enumerate(listed)}
    batches = [s.messages for s in stages if s.messages]
    batch_of = {t: i for i, batch in enumerate(batches) for t in batch}
    writer = {b: t for t in tasks for b in t.writes}
    readers: dict[Buffer, list[Task]] = {}
    for task in tasks:
        for buffer in task.reads:
            readers.setdefault(buffer, []).append(task)
    for stage in stages:
        for task in (*stage.kernels, *stage.messages):
            needs = [writer[b] for b in task.reads]
            needs += [t for t in task.after if not (task in batch_of and t in batch_of)]
            needs += readers.get(task.reuses, []) if task.reuses is not None else []
            for need in needs:
                if need in batch_of:
                    assert batch_of[need] < stage.ended, f"{task} begins before {need} has ended"
                else:
                    assert position[need] < position[task], f"{task} stands before {need}"


def run(algorithm: Algorithm, sizes: Sequence[Sequence[int]], n: int) -> list[Rank]:
    """Every rank at its end. Fails if ranks wait for each other, or a message meets another."""
    chunks = algorithm.chunks(n)
    plans = schedules(algorithm, sizes, n)
    ranks = [Rank(r, algorithm.build(r, n, sizes).tasks, []) for r in range(n)]
    for rank in ranks:
        for s, segment in enumerate(sizes):
            for c in range(chunks):
                if segment[c]:
                    rank.values[s, c] = Counter([rank.number])
    at = [0] * n  # the stage that a rank's stream has come to
    posted: list[list[list[Task]]] = [[] for _ in range(n)]  # batches, as what is left of each
    moved = True
    while moved:
        moved = False
        for r, rank in enumerate(ranks):
            while at[r] < len(plans[r]):
                stage = plans[r][at[r]]
                if any(posted[r][: stage.ended]):
                    break
                for task in stage.kernels:
                    assert step(rank, task, chunks, {})
                assert all(t.reads[0] in rank.held for t in stage.messages if t.reads)
                if stage.messages:
                    posted[r].append(list(stage.messages))
                at[r] += 1
                moved = True
        for rank in ranks:
            begun = next((batch for batch in posted[rank.number] if batch), [])
            for task in [t for t in begun if t.kind is Kind.SEND]:
                if first(begun, task.peer, Kind.SEND) is task:
                    moved |= move(ranks, posted, begun, rank, task)
    waiting = [r for r in range(n) if at[r] < len(plans[r]) or any(posted[r])]
    assert not waiting, f"ranks {waiting} wait for ever"
    return ranks


def first(begun: Sequence[Task], peer: int | None, kind: Kind) -> Task | None:
    """The message of a batch to, or from, a peer that is next."""
    return next((t for t in begun if t.kind is kind and t.peer == peer), None)


def move(
    ranks: list[Rank], posted: list[list[list[Task]]], begun: list[Task], sender: Rank, task: Task
) -> bool:
    """Deliver one message, if the other end has begun to receive from here."""
    assert task.peer is not None
    receiver = ranks[task.peer]
    there = next((batch for batch in posted[receiver.number] if batch), [])
    other = first(there, sender.number, Kind.RECV)
    if other is None:
        return False
    assert letter_of(sender.number, task) == letter_of(receiver.number, other), (
        f"{task} from rank {sender.number} meets {other} of rank {receiver.number}"
    )
    receiver.held[other.writes[0]] = sender.held[task.reads[0]]
    begun.remove(task)
    there.remove(other)
    return True
