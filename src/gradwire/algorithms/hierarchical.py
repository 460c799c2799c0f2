"""Hierarchical (CGX 4.2, HIPRESS 5.1): inside machines first, then between one leader of each.

N ranks on L machines; `nodes[r]` is the machine of rank r, any number. The *leader* of a machine is
its lowest rank, the others are its *members*. L chunks; the leader of machine l, in the order of
leaders, owns chunk l. A *local* is a chunk of a member's values on its way to its leader.

Inside a machine, locals travel in full precision (`inside="full"`) or through the codec
(`inside="codec"`). In full precision, chunk L + l of `sizes` is chunk l uncompressed.

Steps, for each segment:
  1. a member encodes all chunks and sends them to its leader.
  2. a leader receives the locals, and adds them to its own values in the order of ranks.
  3. leaders do a scatter-reduce-allgather between them, through the codec.
  4. a leader sends the payload of every result, unchanged, to its members, who decode it.

Between machines each value is encoded twice. A local is encoded once more, without loss if in full
precision.

Bytes sent: by a member, its locals; by the leader of machine l with m members, sum over segments s
of [sum over c != l of m(s, c)] + (L-1) * m(s, l) + m * [sum over c < L of m(s, c)]. Rounds: 2
inside where a machine has members, 2 between where there are several. Time counts links between
machines alone: for P payload bytes, 2 * alpha + 2 * (L-1)/L * P * beta.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from gradwire.algorithms.halves import contribute, receive, reduce
from gradwire.algorithms.protocol import Sizes, message
from gradwire.engine import Graph

INSIDE = ("full", "codec")


@dataclass(frozen=True)
class Hierarchical:
    """The algorithm on given machines.

    Attributes:
        nodes: machine of each rank; empty: every rank on a machine of its own.
        inside: how locals travel, "full" or "codec".
    """

    nodes: tuple[int, ...] = ()
    inside: str = "full"

    ROLES: ClassVar[tuple[str, ...]] = ("local", "contribution", "result")

    def chunks(self, world_size: int) -> int:
        return len(self.leaders(world_size))

    def rounds(self, world_size: int) -> int:
        machines = self.chunks(world_size)
        return 2 * (machines > 1) + 2 * (machines < world_size)

    def leaders(self, world_size: int) -> list[int]:
        """The lowest rank of each machine, in rank order."""
        return list(self._leaders.values()) if self.nodes else list(range(world_size))

    def leader(self, rank: int, world_size: int) -> int:
        """The leader of `rank`'s machine."""
        assert len(self.nodes) in (0, world_size), (self.nodes, world_size)
        return self._leaders[self.nodes[rank]] if self.nodes else rank

    @cached_property
    def _leaders(self) -> dict[int, int]:
        """The lowest rank of each machine."""
        found: dict[int, int] = {}
        for rank, node in enumerate(self.nodes):
            found.setdefault(node, rank)
        return found

    def build(self, rank: int, world_size: int, sizes: Sizes) -> Graph:
        """The graph of `rank`."""
        graph = Graph(self.ROLES)
        if world_size == 1:
            return graph
        leaders = self.leaders(world_size)
        leader = self.leader(rank, world_size)
        outer = [segment[: len(leaders)] for segment in sizes]
        live = [(s, c) for s, segment in enumerate(outer) for c, n in enumerate(segment) if n]
        members = [r for r in range(world_size) if r != rank and self.leader(r, world_size) == rank]

        def local(s: int, c: int, source: int) -> int:
            return graph.buffer("local", s, self.local_chunk(c, len(leaders)), source)

        def result(s: int, c: int) -> int:
            return graph.buffer("result", s, c, leaders[c])

        if rank != leader:
            for s in range(len(outer)):
                away = [local(s, c, rank) for at, c in live if at == s]
                if away:
                    graph.encode(s, away)
                    for b in away:
                        graph.send(s, b, leader)
            for s, c in live:
                graph.recv(s, result(s, c), leader)
                graph.decode(s, [result(s, c)])
            return graph

        added: dict[tuple[int, int], int] = {}
        for s, c in live if members else ():
            came = [local(s, c, m) for m in members]
            for b, m in zip(came, members, strict=True):
                graph.recv(s, b, m)
            added[s, c] = graph.merge(s, came, own=0)
        contribute(graph, rank, leaders, outer, added)
        reduce(graph, rank, leaders, leaders, outer, added)
        receive(graph, rank, leaders, outer)
        for s, c in live:
            for m in members:
                graph.send(s, result(s, c), m)
        return graph

    def local_chunk(self, chunk: int, machines: int) -> int:
        """Where `sizes` has what a member sends of a chunk."""
        return chunk + machines if self.inside == "full" else chunk

    def hop(self, role: str, chunk: int, sender: int, receiver: int, world_size: int) -> int:
        """In the order of the roles that there are; results reach members last."""
        members = self.chunks(world_size) < world_size
        to_member = role == "result" and self.leader(receiver, world_size) != receiver
        return self.ROLES.index(role) - (not members) + to_member

    def wire_bytes(self, rank: int, world_size: int, sizes: Sizes) -> int:
        """Bytes that `rank` sends, headers included."""
        leaders = self.leaders(world_size)
        machines = len(leaders)
        if rank not in leaders:
            first = self.local_chunk(0, machines)
            return sum(sum(map(message, segment[first : first + machines])) for segment in sizes)
        own = leaders.index(rank)
        members = sum(self.leader(r, world_size) == rank for r in range(world_size)) - 1
        return sum(
            (members + (c != own)) * message(n) + (machines - 1) * (c == own) * message(n)
            for segment in sizes
            for c, n in enumerate(segment[:machines])
        )

    def seconds(self, world_size: int, payload_bytes: float, alpha: float, beta: float) -> float:
        """Expected time between machines; see gradwire.algorithms.protocol."""
        machines = self.chunks(world_size)
        rounds = 2 * (machines > 1)
        return rounds * alpha + 2 * (machines - 1) / machines * payload_bytes * beta
