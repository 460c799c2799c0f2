"""Hierarchical reduce-scatter of shards: sums of machines cross, one per machine and shard.

N ranks on L machines; `nodes[r]` is the machine of rank r, any number. N chunks; chunk c is the
shard of rank c, and has a holder on every machine (gradwire/algorithms/holders.py). A *local* is
the payload of one rank's values, sent inside its machine; a *contribution* is the payload of a
machine's sum, sent to the owner.

Steps, for each segment, on rank r, on a machine of g ranks:
  1. encode the chunks that other ranks of this machine hold or own; send each there. These locals
     travel through the codec (`inside="codec"`) or in full precision (`inside="full"`); then the
     uncompressed chunk c is chunk N + c of `sizes`.
  2. receive the locals of the chunks that r holds; merge: add them to r's own values in the order
     of ranks, and encode the sums; send the contribution to chunk c to rank c. On a machine of one
     rank, contributions are encoded values.
  3. receive chunk r, a local from every other rank of this machine and a contribution from every
     other machine; merge: add them to r's own values in the order of the ranks that sent them;
     locals in full precision first, in a kernel of their own. The sum is not encoded.

Step 2 replaces the values of the chunks that r holds.

A value is encoded at most twice: in a local, without loss if in full precision, and in a machine's
sum. The owner's own values are never encoded. Every encoding is made beside the rank's own values,
so with error feedback its error is in the residual of the rank that made it. In units of the error
of one rank's encoded values, with machines of S ranks: L (S-1) of locals and (L-1) S of sums, where
SRA has N - 1; with locals in full precision N - S.

Bytes sent by rank r: sum over segments s of [sum over chunks c that r holds of m(s, c)] between
machines, and inside, for each other rank p of the machine, the locals of chunk p and of the chunks
that p holds. A machine's link carries the payloads of all other ranks' chunks out, once, and
(L-1) times those of its own ranks in. With equal machines of S ranks and P payload bytes in total,
a rank sends (L-1)/N P between machines, where SRA sends S (L-1)/N P; through the codec (N-1)/N P
in all, as in SRA. Rounds: 1 inside, 1 between. Time counts only links between machines, which the
ranks of a machine share: alpha + (L-1)/L * P * beta.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from gradwire.algorithms.holders import Holders, OnMachines
from gradwire.algorithms.protocol import Sizes, message
from gradwire.engine import Graph


@dataclass(frozen=True)
class HierarchicalReduceScatter(OnMachines):
    """The algorithm on given machines.

    Attributes:
        nodes: machine of each rank; empty: every rank has its own machine.
        inside: how locals travel, "codec" or "full".
    """

    inside: str = "codec"

    ROLES: ClassVar[tuple[str, ...]] = ("local", "contribution")

    def build(self, rank: int, world_size: int, sizes: Sizes) -> Graph:
        """The graph of `rank`."""
        graph = Graph(self.ROLES)
        if world_size == 1:
            return graph
        listing = _Listing(graph, self.holders(world_size), rank, sizes, self.inside == "full")
        # Early steps of a segment precede late steps of the segment before it.
        for wave in range(len(sizes) + 1):
            if wave < len(sizes):
                listing.contribute(wave)
            if wave:
                listing.reduce(wave - 1)
        return graph

    def hop(self, role: str, chunk: int, sender: int, receiver: int, world_size: int) -> int:
        """Locals first, then contributions."""
        return self.ROLES.index(role)

    def wire_bytes(self, rank: int, world_size: int, sizes: Sizes) -> int:
        """Bytes that `rank` sends, headers included."""
        holders = self.holders(world_size)
        first = world_size * (self.inside == "full")
        given = [first + c for p in holders.beside(rank) for c in (p, *holders.held(p))]
        sent = given + holders.held(rank)
        return sum(message(segment[c]) for segment in sizes for c in sent)

    def seconds(self, world_size: int, payload_bytes: float, alpha: float, beta: float) -> float:
        """Expected time between machines; see gradwire.algorithms.protocol."""
        machines = len(self.holders(world_size).machines)
        share = (machines - 1) / machines
        return self.rounds_between(world_size) * alpha + share * payload_bytes * beta


class _Listing:
    """Appends the tasks of one rank to its graph.

    Args:
        full: whether locals are uncompressed.
    """

    def __init__(self, graph: Graph, holders: Holders, rank: int, sizes: Sizes, full: bool) -> None:
        self._graph = graph
        self._rank = rank
        self._sizes = sizes
        self._beyond = len(holders.nodes) if full else 0  # the first uncompressed chunk
        self._full = full
        self._beside = holders.beside(rank)
        self._held = {p: holders.held(p) for p in (rank, *self._beside)}
        self._abroad = holders.abroad(rank)

    def contribute(self, s: int) -> None:
        """Send locals; receive and sum those of the chunks that this rank holds; send the sums.

        A rank's own chunk travels apart from those that it holds, so that what its last merge sums
        is adjacent in memory.
        """
        graph, rank = self._graph, self._rank
        of_peers = [(p, chunks) for p in self._beside for chunks in (self._held[p], [p])]
        given = [(p, self._locals(s, chunks, rank)) for p, chunks in of_peers]
        given = [(p, buffers) for p, buffers in given if buffers]
        if given:
            graph.encode(s, [b for _, buffers in given for b in buffers])
        for p, buffers in given:
            graph.send(s, buffers, p)
        held = [c for c in self._held[rank] if self._sizes[s][c]]
        if not held:
            return
        sums = [graph.buffer("contribution", s, c, rank) for c in held]
        if self._beside:
            for p in self._beside:
                graph.recv(s, self._locals(s, held, p), p)
            writes = [] if self._full else sums
            reads = [b for p in sorted(self._beside) for b in self._locals(s, held, p)]
            added = graph.merge(s, reads, writes, own=self._own(self._beside))
        if self._full or not self._beside:
            graph.encode(s, sums, [added] if self._beside else ())
        for c, buffer in zip(held, sums, strict=True):
            graph.send(s, buffer, c)

    def reduce(self, s: int) -> None:
        """Receive and sum what belongs to the own chunk."""
        graph, rank = self._graph, self._rank
        if not self._sizes[s][rank]:
            return
        inside = {p: self._locals(s, [rank], p)[0] for p in self._beside}
        between = {p: graph.buffer("contribution", s, rank, p) for p in self._abroad}
        for p, buffer in (*inside.items(), *between.items()):
            graph.recv(s, buffer, p)
        # One kernel decodes payloads of one form.
        terms = [inside, between] if self._full else [inside | between]
        terms = [of_kernel for of_kernel in terms if of_kernel]
        after: list[int] = []
        for of_kernel in terms:
            reads = [of_kernel[p] for p in sorted(of_kernel)]
            final = of_kernel is terms[-1]
            after = [graph.merge(s, reads, own=self._own(of_kernel), final=final, after=after)]

    def _own(self, peers: Iterable[int]) -> int:
        """The position of the own values in a sum with those of `peers`."""
        return sum(p < self._rank for p in peers)

    def _locals(self, s: int, chunks: Sequence[int], source: int) -> list[int]:
        """The buffers of a rank's locals, except of empty chunks."""
        live = [c for c in chunks if self._sizes[s][c]]
        return [self._graph.buffer("local", s, c + self._beyond, source) for c in live]
