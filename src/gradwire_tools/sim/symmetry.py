"""Rotational symmetry: where the graphs of all nodes are rotations of each other, one node
represents all.

Ranks are rotated by whole nodes: with M ranks per node, rank r becomes r + M, and chunks move with
their owners. If every rank's graph is a rotation of its predecessor's, then so are all events on
the clock: when a rank of node 0 sends to rank M k + q, rank q of node 0 receives the rotated
message at the same time from the node k places behind. So node 0 is simulated with its egress
looped back to its ingress. The result is exact if all chunks have the same size and all ranks list
their tasks in the same order, rotated.

Nodes in a grid are rotated along rows and columns independently: node (row, column) is that many
rows and columns from node 0, modulo the grid's size.
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
        ranks: ranks per node.
        chunks: number of chunks into which the algorithm cuts the values. A higher chunk index is
            another form of a chunk, and rotates with it.
        columns: number of columns of the grid of nodes; 0: one row.
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
        """Whether chunks can rotate with their owners."""
        whole = self.world_size % self.ranks == 0
        whole = whole and (not self.columns or self.nodes % self.columns == 0)
        return whole and (self.chunks == 1 or self.chunks % self.nodes == 0)

    def rank(self, rank: int, steps: int) -> int:
        """The image of a rank under the rotation of node 0 to node `steps`; a negative number is
        the inverse rotation."""
        node, place = divmod(rank, self.ranks)
        return self._node(node, steps) * self.ranks + place

    def chunk(self, chunk: int, steps: int) -> int:
        """The image of a chunk under that rotation."""
        if self.chunks == 1:
            return chunk
        form, place = divmod(chunk, self.chunks)
        each = self.chunks // self.nodes
        node, place = divmod(place, each)
        return form * self.chunks + self._node(node, steps) * each + place

    def _node(self, node: int, steps: int) -> int:
        """The image of a node under that rotation."""
        columns = self.columns or self.nodes
        sign = -1 if steps < 0 else 1
        (row, column), (down, right) = divmod(node, columns), divmod(abs(steps), columns)
        row = (row + sign * down) % (self.nodes // columns)
        return row * columns + (column + sign * right) % columns

    def holds(self, build: Callable[[int], Graph], nodes: tuple[int, ...]) -> bool:
        """Whether the graphs of the ranks on these nodes have node 0's tasks, rotated.

        The order in which a merge sums may differ, as it does not affect time, and so may the
        order of tasks.
        """
        for rank in range(self.ranks):
            first = build(rank)
            for steps in nodes:
                found = build(self.rank(rank, steps))
                if set(self.rotated_tasks(first, steps)) != set(self.rotated_tasks(found, 0)):
                    return False
        return True

    def rotated_tasks(self, graph: Graph, steps: int) -> list[Hashable]:
        """A graph's tasks, rotated, in order; only what affects time."""
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
