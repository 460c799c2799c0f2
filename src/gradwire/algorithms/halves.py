"""The two halves of scatter-reduce-allgather, between any ranks and for any owners of chunks.

Vocabulary. `owners[c]` is the rank that sums chunk c. A *contribution* is a chunk of one rank's
values on its way to the owner; a *result* is the encoded sum on its way back.

    contribute   encode the chunks that others own; send each to its owner
    reduce       receive the contributions to the own chunks; merge; encode; send the results
    receive      receive the results of the chunks that others own; decode

Peers are visited in the order rank + 1, rank + 2, ..., so that no rank is everyone's first target.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gradwire.algorithms.protocol import Sizes
from gradwire.engine import Buffer, Kind, Task

# (segment, chunk) -> the task that must have changed the chunk's values before they are taken
Changes = Mapping[tuple[int, int], Task]


def onward(rank: int, ranks: Iterable[int]) -> list[int]:
    """All other ranks: those above `rank` in order, then those below it."""
    return sorted(set(ranks) - {rank}, key=lambda other: (other < rank, other))


def contribute(
    rank: int, owners: Sequence[int], sizes: Sizes, after: Changes | None = None
) -> list[Task]:
    """For each segment one batched encode of what others own, and a send for each chunk."""
    tasks: list[Task] = []
    for s, segment in enumerate(sizes):
        away = [
            Buffer("contribution", s, c, rank)
            for peer in onward(rank, owners)
            for c, owner in enumerate(owners)
            if owner == peer and segment[c]
        ]
        if away:
            changes = tuple(after[s, b.chunk] for b in away) if after else ()
            tasks.append(Task(Kind.ENCODE, s, writes=tuple(away), after=changes))
            tasks += [Task(Kind.SEND, s, reads=(b,), peer=owners[b.chunk]) for b in away]
    return tasks


def reduce(
    rank: int,
    ranks: Sequence[int],
    owners: Sequence[int],
    sizes: Sizes,
    after: Changes | None = None,
    encode: bool = True,
) -> list[Task]:
    """For each own chunk: the peers' contributions, their sum in rank order, its way to the peers.

    Without `encode` the sum stays here, in full precision.
    """
    peers = onward(rank, ranks)
    tasks: list[Task] = []
    for s, segment in enumerate(sizes):
        for c, owner in enumerate(owners):
            if owner != rank or not segment[c]:
                continue
            gathered = {p: Buffer("contribution", s, c, p) for p in peers}
            tasks += [Task(Kind.RECV, s, writes=(b,), peer=p) for p, b in gathered.items()]
            merge = Task(
                Kind.MERGE,
                s,
                reads=tuple(gathered[p] for p in sorted(peers)),
                writes=(Buffer("result", s, c, rank),) if encode else (),
                own=sum(p < rank for p in peers),
                final=True,
                after=(after[s, c],) if after else (),
            )
            tasks.append(merge)
            if encode:
                tasks += [Task(Kind.SEND, s, reads=merge.writes, peer=p) for p in peers]
    return tasks


def receive(rank: int, owners: Sequence[int], sizes: Sizes, contributed: bool = True) -> list[Task]:
    """The results of the chunks that others own, decoded.

    If this rank has `contributed` to them, they take its contributions' memory: an owner has
    received these before it has a result.
    """
    tasks: list[Task] = []
    for s, segment in enumerate(sizes):
        for peer in onward(rank, owners):
            for c, owner in enumerate(owners):
                if owner == peer and segment[c]:
                    result = Buffer("result", s, c, peer)
                    earlier = Buffer("contribution", s, c, rank) if contributed else None
                    recv = Task(Kind.RECV, s, writes=(result,), peer=peer, reuses=earlier)
                    tasks.append(recv)
                    tasks.append(Task(Kind.DECODE, s, reads=(result,)))
    return tasks
