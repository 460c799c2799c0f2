"""Builds the jobs of the simulated ranks: of all ranks, or of one node that represents all."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from gradwire.algorithms import Algorithm, Hierarchical
from gradwire.collectives import AVERAGE, Operation, Options
from gradwire.engine import Graph, Kind
from gradwire.errors import ConfigError
from gradwire_tools.sim.buckets import Bucket
from gradwire_tools.sim.curves import Curves
from gradwire_tools.sim.rank import TimedGraph
from gradwire_tools.sim.symmetry import Symmetry
from gradwire_tools.sim.task_times import BucketContents, bucket_contents, equal_chunks, timed_graph

# Messages of all ranks together. Up to this number all ranks are simulated, in about ten seconds.
EXACT_MESSAGES = 200_000


class Ensemble:
    """Ranks, an algorithm and a machine's curves.

    Args:
        per_node: ranks per node.
        operation: of all buckets.
    """

    def __init__(
        self,
        ranks: int,
        per_node: int,
        algorithm: Algorithm,
        options: Options,
        curves: Curves,
        operation: Operation = AVERAGE,
    ) -> None:
        self.ranks = ranks
        self.operation = operation
        self.algorithm = algorithm
        self.options = options
        self.curves = curves
        chunks = options.partitions or algorithm.chunks(ranks)
        columns = algorithm.columns(ranks) if isinstance(algorithm, Hierarchical) else 0
        self.rotation = Symmetry(ranks, per_node, chunks, columns)
        # Caches: a model's layers repeat, and so do its buckets.
        self._known_contents: dict[Hashable, BucketContents] = {}
        self._known_jobs: dict[Hashable, TimedGraph] = {}

    def jobs(
        self, buckets: Sequence[Bucket], exact: bool | None
    ) -> tuple[Symmetry | None, list[list[TimedGraph]]]:
        """(the rotation under which ranks are symmetric, or None if all are simulated; the jobs of
        each simulated rank).

        Args:
            exact: whether all ranks are simulated; None: if messages are few, or if ranks are not
                symmetric.

        Raises:
            ConfigError: `exact` is False and ranks are not symmetric, or a codec has no curve.
        """
        symmetric = not exact and self._symmetric(buckets[0])
        if exact is False and not symmetric:
            raise ConfigError(
                "the ranks of this algorithm are not symmetric, so one node cannot represent all"
            )
        if exact is None and symmetric:
            each = sum(self._job(bucket, 0, True).graph.kind.count(Kind.SEND) for bucket in buckets)
            symmetric = each * self.ranks > EXACT_MESSAGES
        count = self.rotation.ranks if symmetric else self.ranks
        jobs = [[self._job(bucket, rank, symmetric) for bucket in buckets] for rank in range(count)]
        return (self.rotation if symmetric else None), jobs

    def _symmetric(self, bucket: Bucket) -> bool:
        """Whether the tasks of node 0, rotated, are those of four other nodes: the next one, the
        one in the next row, the farthest and the last."""
        if self.rotation.nodes < 2 or not self.rotation.possible:
            return False
        sizes = self._contents(bucket, True).sizes

        def build(rank: int) -> Graph:
            return self.algorithm.build(rank, self.ranks, sizes)

        r = self.rotation
        return r.holds(build, tuple(sorted({1, r.columns or 1, r.nodes // 2, r.nodes - 1})))

    def _contents(self, bucket: Bucket, symmetric: bool) -> BucketContents:
        key = _key(bucket, symmetric)
        if key not in self._known_contents:
            in_memory = self.rotation.ranks >= self.ranks
            contents = bucket_contents(
                bucket, self.algorithm, self.options, self.ranks, in_memory, self.operation
            )
            self._known_contents[key] = (
                equal_chunks(contents, self.rotation.chunks) if symmetric else contents
            )
        return self._known_contents[key]

    def _job(self, bucket: Bucket, rank: int, symmetric: bool) -> TimedGraph:
        key = rank, _key(bucket, symmetric)
        if key not in self._known_jobs:
            contents = self._contents(bucket, symmetric)
            self._known_jobs[key] = timed_graph(
                contents, self.algorithm, rank, self.ranks, self.curves
            )
        return self._known_jobs[key]


def _key(bucket: Bucket, symmetric: bool) -> Hashable:
    """What a bucket's contents depend on; the rotation has no effect on chunks of equal size."""
    return symmetric, tuple(
        (
            spec.numel, spec.dtype, spec.codec, spec.feedback, spec.lengths,
            0 if symmetric else spec.rotation,
        )
        for spec in bucket
    )  # fmt: skip
