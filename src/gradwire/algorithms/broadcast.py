"""Broadcast: every rank ends with the root's values, decoded from the root's payload.

Two algorithms, for N ranks. The *result* of a chunk is its encoded values.

**Scatter, all-gather** (`sra`): N chunks. Steps, for each segment:
  1. the root encodes all chunks; sends chunk c to rank c, and its own chunk to every peer.
  2. rank c forwards chunk c, unchanged, to every other rank except the root.
  3. every rank decodes what it received, the root what it sent.

Bytes sent, summed over segments s: by the root, [sum over c != root of m(s, c)] + (N-1) times
m(s, root); by another rank r, (N-2) * m(s, r). Rounds: 2. Time, for P payload bytes in total:
2 * alpha + 2 * (N-1)/N * P * beta.

**Tree** (`tree`): one chunk; the binomial tree of gradwire.algorithms.tree, downwards, with ranks
counted from the root. Rounds: ceil(log2 N). Bytes sent: children of r times m(s, 0). Time:
ceil(log2 N) * (alpha + P * beta). For small payloads: its root sends ceil(log2 N) messages, not
2 (N-1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradwire.algorithms import tree
from gradwire.algorithms.halves import peers_after
from gradwire.algorithms.protocol import Sizes, message
from gradwire.engine import Graph


@dataclass(frozen=True)
class ScatterAllGather:
    """From rank `root`, in chunks."""

    root: int = 0

    ROLES: ClassVar[tuple[str, ...]] = ("result",)

    def chunks(self, world_size: int) -> int:
        return world_size

    def rounds(self, world_size: int) -> int:
        return min(world_size - 1, 2)

    def build(self, rank: int, world_size: int, sizes: Sizes) -> Graph:
        """The graph of `rank`."""
        graph = Graph(self.ROLES)
        if world_size == 1:
            return graph
        peers = peers_after(rank, range(world_size))
        if rank == self.root:
            for s, segment in enumerate(sizes):
                live = [c for c in (*peers, rank) if segment[c]]
                buffers = [graph.buffer("result", s, c, rank) for c in live]
                if live:
                    graph.encode(s, buffers)
                for c, b in zip(live, buffers, strict=True):
                    for peer in peers if c == rank else (c,):
                        graph.send(s, b, peer)
                for b in buffers:
                    graph.decode(s, [b])
            return graph
        for s, segment in enumerate(sizes):
            for c in [c for c in (rank, self.root) if segment[c]]:
                came = graph.buffer("result", s, c, self.root)
                graph.recv(s, came, self.root)
                if c == rank:
                    for peer in peers:
                        if peer != self.root:
                            graph.send(s, came, peer)
                graph.decode(s, [came])
        for s, segment in enumerate(sizes):
            for p in peers:
                if p != self.root and segment[p]:
                    relayed = graph.buffer("result", s, p, self.root)
                    graph.recv(s, relayed, p)
                    graph.decode(s, [relayed])
        return graph

    def hop(self, role: str, chunk: int, sender: int, receiver: int, world_size: int) -> int:
        """The root's messages first, then the forwarded ones."""
        return int(sender != self.root)

    def wire_bytes(self, rank: int, world_size: int, sizes: Sizes) -> int:
        """Bytes that `rank` sends, headers included."""
        if world_size == 1:
            return 0
        if rank != self.root:
            return (world_size - 2) * sum(message(segment[rank]) for segment in sizes)
        return sum(
            message(n) * (world_size - 1 if c == rank else 1)
            for segment in sizes
            for c, n in enumerate(segment)
        )

    def seconds(self, world_size: int, payload_bytes: float, alpha: float, beta: float) -> float:
        """Expected time; see gradwire.algorithms.protocol."""
        share = (world_size - 1) / world_size
        return self.rounds(world_size) * alpha + 2 * share * payload_bytes * beta


@dataclass(frozen=True)
class Tree:
    """From rank `root`, down a binomial tree."""

    root: int = 0

    ROLES: ClassVar[tuple[str, ...]] = ("result",)

    def chunks(self, world_size: int) -> int:
        return 1

    def rounds(self, world_size: int) -> int:
        return (world_size - 1).bit_length()

    def build(self, rank: int, world_size: int, sizes: Sizes) -> Graph:
        """The graph of `rank`."""
        graph = Graph(self.ROLES)
        if world_size == 1:
            return graph
        place = (rank - self.root) % world_size  # in the tree
        for s, segment in enumerate(sizes):
            if not segment[0]:
                continue
            result = graph.buffer("result", s, 0, self.root)
            if place:
                graph.recv(s, result, (tree.parent(place) + self.root) % world_size)
            else:
                graph.encode(s, [result])
            for child in reversed(tree.children(place, world_size)):
                graph.send(s, result, (child + self.root) % world_size)
            graph.decode(s, [result])
        return graph

    def hop(self, role: str, chunk: int, sender: int, receiver: int, world_size: int) -> int:
        """The sender's depth in the tree."""
        return ((sender - self.root) % world_size).bit_count()

    def wire_bytes(self, rank: int, world_size: int, sizes: Sizes) -> int:
        """Bytes that `rank` sends, headers included."""
        below = tree.children((rank - self.root) % world_size, world_size)
        return len(below) * sum(message(segment[0]) for segment in sizes)

    def seconds(self, world_size: int, payload_bytes: float, alpha: float, beta: float) -> float:
        """Expected time; see gradwire.algorithms.protocol."""
        return self.rounds(world_size) * (alpha + payload_bytes * beta)
