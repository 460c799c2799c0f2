"""Builds the graphs of the simulated ranks: of all ranks, or of one node that represents all."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from gradwire.algorithms import Algorithm, Hierarchical
from gradwire.collectives import Operation, Options, Part
from gradwire.engine import Graph, Kind
from gradwire.errors import ConfigError
from gradwire_tools.sim.curves import Curves
from gradwire_tools.sim.rank import TimedGraph
from gradwire_tools.sim.symmetry import Symmetry
from gradwire_tools.sim.task_times import (
    BucketContents,
    algorithm_on,
    bucket_contents,
    equal_chunks,
    timed_graph,
)

# Messages of all ranks together. Up to this number all ranks are simulated, in about ten seconds.
EXACT_MESSAGES = 200_000


class Ensemble:
    """Ranks, and a machine's curves.

    Args:
        per_node: ranks per node.
    """

    def __init__(self, ranks: int, per_node: int, curves: Curves) -> None:
        self.ranks = ranks
        self.per_node = per_node
        self.curves = curves
        # Caches: a model's layers repeat, and so do its collectives.
        self._known_contents: dict[Hashable, BucketContents] = {}
        self._known_graphs: dict[Hashable, TimedGraph] = {}

    def graphs(
        self, parts: Sequence[Part], exact: bool | None
    ) -> tuple[int, list[list[TimedGraph]]]:
        """(how many nodes a simulated one represents; of each simulated rank, the graphs of these
        collectives).

        Args:
            exact: whether all ranks are simulated; None: if messages are few, or if ranks are not
                symmetric.

        Raises:
            ConfigError: `exact` is False and ranks are not symmetric, or a codec has no curve.
        """
        kinds = {(part.operation, part.options): part for part in reversed(parts)}
        symmetric = not exact and self._symmetric(kinds.values())
        if exact is False and not symmetric:
            raise ConfigError(
                "the ranks of this algorithm are not symmetric, so one node cannot represent all"
            )
        if exact is None and symmetric:
            each = sum(self.graph(part, 0, True).graph.kind.count(Kind.SEND) for part in parts)
            symmetric = each * self.ranks > EXACT_MESSAGES
        count = self.per_node if symmetric else self.ranks
        graphs = [[self.graph(part, rank, symmetric) for part in parts] for rank in range(count)]
        return (self.ranks // self.per_node if symmetric else 1), graphs

    def latencies(self, part: Part) -> int:
        """How many messages between nodes follow each other."""
        algorithm, _ = self._kind(part)
        if isinstance(algorithm, Hierarchical):
            return algorithm.rounds_between(self.ranks)
        return algorithm.rounds(self.ranks)

    def _kind(self, part: Part) -> tuple[Algorithm, Symmetry]:
        return _kind(part.operation, part.options, self.ranks, self.per_node)

    def _symmetric(self, kinds: Iterable[Part]) -> bool:
        """Whether the tasks of node 0, rotated, are those of four other nodes: the next one, the
        one in the next row, the farthest and the last; in all these collectives alike."""
        columns = {self._kind(part)[1].columns for part in kinds}
        return len(columns) == 1 and all(map(self._rotates, kinds))

    def _rotates(self, part: Part) -> bool:
        algorithm, r = self._kind(part)
        if r.nodes < 2 or not r.possible:
            return False
        sizes = self._contents(part, True).sizes

        def build(rank: int) -> Graph:
            return algorithm.build(rank, self.ranks, sizes)

        return r.holds(build, tuple(sorted({1, r.columns or 1, r.nodes // 2, r.nodes - 1})))

    def _contents(self, part: Part, symmetric: bool) -> BucketContents:
        key = _key(part, symmetric)
        if key not in self._known_contents:
            algorithm, rotation = self._kind(part)
            in_memory = self.per_node >= self.ranks
            contents = bucket_contents(
                part.specs, algorithm, part.options, self.ranks, in_memory, part.operation
            )
            self._known_contents[key] = (
                equal_chunks(contents, rotation.chunks) if symmetric else contents
            )
        return self._known_contents[key]

    def graph(self, part: Part, rank: int, symmetric: bool = False) -> TimedGraph:
        """Of one collective on one rank; `symmetric`: which represents others."""
        key = rank, _key(part, symmetric)
        if key not in self._known_graphs:
            (algorithm, rotation), contents = self._kind(part), self._contents(part, symmetric)
            made = timed_graph(contents, algorithm, rank, self.ranks, self.curves)
            self._known_graphs[key] = replace(made, rotation=rotation if symmetric else None)
        return self._known_graphs[key]


@lru_cache(maxsize=256)
def _kind(
    operation: Operation, options: Options, ranks: int, per_node: int
) -> tuple[Algorithm, Symmetry]:
    """The algorithm of collectives, and its symmetry."""
    algorithm = algorithm_on(options, ranks, per_node, operation)
    columns = algorithm.columns(ranks) if isinstance(algorithm, Hierarchical) else 0
    chunks = options.partitions or algorithm.chunks(ranks)
    return algorithm, Symmetry(ranks, per_node, chunks, columns)


def _key(part: Part, symmetric: bool) -> Hashable:
    """What a collective's contents depend on; the rotation has no effect on chunks of equal
    size."""
    return symmetric, part.operation, part.options, tuple(
        (
            spec.numel, spec.dtype, spec.codec, spec.feedback, spec.lengths,
            0 if symmetric else spec.rotation,
        )
        for spec in part.specs
    )  # fmt: skip
