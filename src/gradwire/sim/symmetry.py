"""Graphs that are alike on all nodes but for a rotation, so that one node stands for all.

Ranks are rotated by whole nodes: with M ranks a node, rank r becomes r + M, and chunks move on with
their owners. If every rank's graph is its predecessor's, rotated, then so is all that happens on
the clock, and what a rank of node 0 sends to rank M k + q at some time arrives there as what rank q
of node 0 receives, at the same time, from the node k places behind. So node 0 is simulated with its
egress looped back to its ingress: exactly, if all chunks are of one size and all ranks list their
tasks in the same order, rotated.

Nodes that stand in rows are rotated along rows and columns, each by itself: node (row, column) is
as many rows and columns from node 0, modulo their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from gradwire.engine import Graph


@dataclass(frozen=True)
class Symmetry:
    """The rotation of all ranks by one node.

    Attributes:
        world_size: number of ranks, a multiple of `ranks`.
        ranks: of a node.
        chunks: into how many the algorithm cuts the values. What stands beyond (a chunk in another
            form) turns with the chunk it is.
        columns: of the rows in which nodes stand; 0: all are in one.
    """

    world_size: int
    ranks: int
    chunks: int
    columns: int = 0

    @property
    def nodes(self) -> int:
        return self.world_size // self.ranks

    @property
    def possible(self) -> bool:
        """Whether chunks can move on with their owners."""
        whole = self.world_size % self.ranks == 0
        whole = whole and (not self.columns or self.nodes % self.columns == 0)
        return whole and (self.chunks == 1 or self.chunks % self.nodes == 0)

    def rank(self, rank: int, steps: int) -> int:
        """Where the rotation that takes node 0 to node `steps` takes a rank; -`steps` is the one
        that takes that node to node 0."""
        node, place = divmod(rank, self.ranks)
        return self._node(node, steps) * self.ranks + place

    def chunk(self, chunk: int, steps: int) -> int:
        """Where it takes a chunk."""
        if self.chunks == 1:
            return chunk
        form, place = divmod(chunk, self.chunks)
        each = self.chunks // self.nodes
        node, place = divmod(place, each)
        return form * self.chunks + self._node(node, steps) * each + place

    def _node(self, node: int, steps: int) -> int:
        """Where it takes a node."""
        columns = self.columns or self.nodes
        sign = -1 if steps < 0 else 1
        (row, column), (down, right) = divmod(node, columns), divmod(abs(steps), columns)
        row = (row + sign * down) % (self.nodes // columns)
        return row * columns + (column + sign * right) % columns

    def holds(self, build: Callable[[int], Graph], nodes: tuple[int, ...]) -> bool:
        """Whether the graphs of the ranks on these nodes have node 0's tasks, rotated.

        The order in which a merge sums may differ, since it takes no time; and that of tasks.
        """
        if not self.possible:
            return False
        for rank in range(self.ranks):
            first = build(rank)
            for steps in nodes:
                found = build(self.rank(rank, steps))
                if set(self.forms(first, steps)) != set(self.forms(found, 0)):
                    return False
        return True

    def forms(self, graph: Graph, steps: int) -> list[Hashable]:
        """All that matters on a clock of a graph's tasks, rotated, in order."""
        g = graph
        buffers = [
            (role, segment, self.chunk(chunk, steps), self.rank(source, steps))
            for role, segment, chunk, source in zip(
                g.buffer_role, g.buffer_segment, g.buffer_chunk, g.buffer_source, strict=True
            )
        ]
        alone = [
            (
                g.kind[task],
                frozenset(buffers[b] for b in g.reads[task]),
                frozenset(buffers[b] for b in g.writes[task]),
                g.segment[task],
                self.rank(g.peer[task], steps) if g.peer[task] >= 0 else -1,
            )
            for task in range(len(g))
        ]
        return [
            (form, frozenset(alone[earlier] for earlier in after))
            for form, after in zip(alone, g.after, strict=True)
        ]
