"""The two halves of scatter-reduce-allgather, for any set of ranks and any owners of chunks.

Vocabulary. `owners[c]` is the rank that sums chunk c. A *contribution* is the payload of a chunk of
one rank's values, sent to the owner; a *result* is the payload of the sum, sent back.

    contribute   encode the chunks that others own; send each to its owner
    reduce       receive the contributions to the own chunks; merge; encode; send the results
    receive      receive the results of the chunks that others own; decode

Each rank visits its peers in the order rank + 1, rank + 2, ..., so that first sends spread over all
ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from gradwire.algorithms.protocol import Sizes
from gradwire.engine import Graph

# (segment, chunk) -> the task that must have changed the chunk's values before they are read
Changes = Mapping[tuple[int, int], int]


def peers_after(rank: int, ranks: Iterable[int]) -> list[int]:
    """All other ranks in order: first those above `rank`, then those below it."""
    return sorted(set(ranks) - {rank}, key=lambda other: (other < rank, other))


def contribute(
    graph: Graph, rank: int, owners: Sequence[int], sizes: Sizes, after: Changes | None = None
) -> None:
    """For each segment, one batched encode of the chunks that others own, and one send per
    chunk."""
    for s, segment in enumerate(sizes):
        away = [(c, owner) for c, owner in _of_others(rank, owners) if segment[c]]
        if away:
            buffers = [graph.buffer("contribution", s, c, rank) for c, _ in away]
            graph.encode(s, buffers, [after[s, c] for c, _ in away] if after else ())
            for buffer, (_, owner) in zip(buffers, away, strict=True):
                graph.send(s, buffer, owner)


def reduce(
    graph: Graph,
    rank: int,
    ranks: Sequence[int],
    owners: Sequence[int],
    sizes: Sizes,
    after: Changes | None = None,
    encode: bool = True,
) -> None:
    """For each own chunk: receive the peers' contributions, sum in rank order, send the result.

    Without `encode` the sum is not sent, and stays in full precision.
    """
    peers = peers_after(rank, ranks)
    for s, segment in enumerate(sizes):
        for c, owner in enumerate(owners):
            if owner != rank or not segment[c]:
                continue
            gathered = {p: graph.buffer("contribution", s, c, p) for p in peers}
            for p, buffer in gathered.items():
                graph.recv(s, buffer, p)
            results = [graph.buffer("result", s, c, rank)] if encode else []
            graph.merge(
                s,
                reads=[gathered[p] for p in sorted(peers)],
                writes=results,
                own=sum(p < rank for p in peers),
                final=True,
                after=(after[s, c],) if after else (),
            )
            for result in results:
                for p in peers:
                    graph.send(s, result, p)


def receive(
    graph: Graph, rank: int, owners: Sequence[int], sizes: Sizes, contributed: bool = True
) -> None:
    """Receive and decode the results of the chunks that others own.

    If this rank has `contributed` to them, results reuse the memory of its contributions: an owner
    has received these before it sends a result.
    """
    for s, segment in enumerate(sizes):
        for c, owner in _of_others(rank, owners):
            if segment[c]:
                result = graph.buffer("result", s, c, owner)
                earlier = graph.buffer("contribution", s, c, rank) if contributed else None
                graph.recv(s, result, owner, reuses=earlier)
                graph.decode(s, [result])


def _of_others(rank: int, owners: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(chunk, owner) for the chunks of other ranks, owner by owner."""
    chunks: dict[int, list[int]] = {}
    for chunk, owner in enumerate(owners):
        chunks.setdefault(owner, []).append(chunk)
    for owner in peers_after(rank, owners):
        for chunk in chunks[owner]:
            yield chunk, owner
