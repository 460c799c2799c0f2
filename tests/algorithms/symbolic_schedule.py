"""Executes the schedules of all ranks symbolically, over the strictest links: a batch begins when
the one before it has ended on that rank, a message moves when both of its ends have begun, and
between two ranks the first send matches the first receive.
"""

from __future__ import annotations

from collections.abc import Sequence

from symbolic import Rank, begin, key_of, message_of, step, take

from gradwire.algorithms import Algorithm
from gradwire.engine import Graph, Kind
from rooms.engine import Wave, lower


def schedules(
    algorithm: Algorithm, sizes: Sequence[Sequence[int]], n: int
) -> list[tuple[Wave, ...]]:
    """The schedules of all ranks; each is checked by itself."""
    found = []
    for rank in range(n):
        graph = algorithm.build(rank, n, sizes)
        stages = lower(graph, rank, lambda *message: algorithm.hop(*message, n))
        check_order(graph, stages)
        found.append(stages)
    return found


def check_order(graph: Graph, stages: Sequence[Wave]) -> None:
    """Check that each task occurs once, after everything that it needs."""
    listed = [t for s in stages for t in (*s.kernels, *s.messages)]
    assert sorted(listed) == list(range(len(graph)))
    # Within a stage, kernels precede messages.
    position = {t: i for i, t in enumerate(listed)}
    batches = [s.messages for s in stages if s.messages]
    batch_of = {t: i for i, batch in enumerate(batches) for t in batch}
    readers: dict[int, list[int]] = {}
    for task, reads in enumerate(graph.reads):
        for buffer in reads:
            readers.setdefault(buffer, []).append(task)
    for stage in stages:
        for task in (*stage.kernels, *stage.messages):
            needs = [graph.writer[b] for b in graph.reads[task]]
            needs += [t for t in graph.after[task] if not (task in batch_of and t in batch_of)]
            needs += readers.get(graph.reuses[task], [])
            for need in needs:
                what, other = graph.describe(task), graph.describe(need)
                if need in batch_of:
                    assert batch_of[need] < stage.ended, f"{what} begins before {other} has ended"
                else:
                    assert position[need] < position[task], f"{what} stands before {other}"


def run(algorithm: Algorithm, sizes: Sequence[Sequence[int]], n: int) -> list[Rank]:
    """Run all ranks to their ends. Fails on a deadlock, or if different messages match."""
    chunks = algorithm.chunks(n)
    plans, ranks = schedules(algorithm, sizes, n), begin(algorithm, sizes, n)
    at = [0] * n  # per rank, the stage that its stream has reached
    posted: list[list[list[int]]] = [[] for _ in range(n)]  # per rank and batch, messages left
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
                sends = [t for t in stage.messages if rank.graph.kind[t] is Kind.SEND]
                assert all(b in rank.held for t in sends for b in rank.graph.message(t))
                if stage.messages:
                    posted[r].append(list(stage.messages))
                at[r] += 1
                moved = True
        for rank in ranks:
            begun = next((batch for batch in posted[rank.number] if batch), [])
            for task in list(begun):
                if first(rank.graph, begun, rank.graph.peer[task], Kind.SEND) == task:
                    moved |= move(ranks, posted, begun, rank, task)
    waiting = [r for r in range(n) if at[r] < len(plans[r]) or any(posted[r])]
    assert not waiting, f"ranks {waiting} wait for ever"
    return ranks


def first(graph: Graph, begun: Sequence[int], peer: int, kind: Kind) -> int | None:
    """The next message of a batch to, or from, a peer."""
    return next((t for t in begun if graph.kind[t] is kind and graph.peer[t] == peer), None)


def move(
    ranks: list[Rank], posted: list[list[list[int]]], begun: list[int], sender: Rank, task: int
) -> bool:
    """Deliver one message, if the other end has begun to receive from here."""
    receiver = ranks[sender.graph.peer[task]]
    there = next((batch for batch in posted[receiver.number] if batch), [])
    other = first(receiver.graph, there, sender.number, Kind.RECV)
    if other is None:
        return False
    assert key_of(sender, task) == key_of(receiver, other), (
        f"{sender.graph.describe(task)} from rank {sender.number} meets "
        f"{receiver.graph.describe(other)} of rank {receiver.number}"
    )
    take(receiver, other, message_of(sender, task))
    begun.remove(task)
    there.remove(other)
    return True
