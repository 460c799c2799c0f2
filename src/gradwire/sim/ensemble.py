"""Makes the jobs of the ranks that are simulated: of all, or of one node that stands for all."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from gradwire.algorithms import Algorithm, Hierarchical
from gradwire.collectives import Options
from gradwire.engine import Graph, Kind
from gradwire.errors import ConfigError
from gradwire.sim.buckets import Bucket
from gradwire.sim.curves import Curves
from gradwire.sim.rank import Timed
from gradwire.sim.symmetry import Symmetry
from gradwire.sim.work import Amounts, amounts, level, timed

# Of all ranks together: up to here all are simulated, in some ten seconds.
EXACT_MESSAGES = 200_000


class Ensemble:
    """Ranks, an algorithm and a machine's curves.

    Args:
        per_node: ranks of a node.
    """

    def __init__(
        self, ranks: int, per_node: int, algorithm: Algorithm, options: Options, curves: Curves
    ) -> None:
        self.ranks = ranks
        self.algorithm = algorithm
        self.options = options
        self.curves = curves
        chunks = options.partitions or algorithm.chunks(ranks)
        columns = algorithm.columns(ranks) if isinstance(algorithm, Hierarchical) else 0
        self.rotation = Symmetry(ranks, per_node, chunks, columns)
        # A model's layers repeat, and so do its buckets.
        self._amounts: dict[Hashable, Amounts] = {}
        self._timed: dict[Hashable, Timed] = {}

    def jobs(
        self, handed: Sequence[Bucket], exact: bool | None
    ) -> tuple[Symmetry | None, list[list[Timed]]]:
        """(the rotation under which ranks are alike, or None: all are here, each rank's jobs).

        Args:
            exact: whether all ranks are to be simulated; None: if messages are few, or if ranks
                are not alike.

        Raises:
            ConfigError: `exact` is False, and ranks are not alike; a codec has no curve.
        """
        alike = not exact and self._alike(handed[0])
        if exact is False and not alike:
            raise ConfigError(
                "the ranks of this algorithm are not alike, so one node cannot stand for all"
            )
        if exact is None and alike:
            each = sum(self._job(bucket, 0, True).graph.kind.count(Kind.SEND) for bucket in handed)
            alike = each * self.ranks > EXACT_MESSAGES
        count = self.rotation.ranks if alike else self.ranks
        jobs = [[self._job(bucket, rank, alike) for bucket in handed] for rank in range(count)]
        return (self.rotation if alike else None), jobs

    def _alike(self, bucket: Bucket) -> bool:
        """Whether the next node, that in the next row, the farthest and the last do what node 0
        does."""
        if self.rotation.nodes < 2 or not self.rotation.possible:
            return False
        sizes = self._held(bucket, True).sizes

        def build(rank: int) -> Graph:
            return self.algorithm.build(rank, self.ranks, sizes)

        r = self.rotation
        return r.holds(build, tuple(sorted({1, r.columns or 1, r.nodes // 2, r.nodes - 1})))

    def _held(self, bucket: Bucket, alike: bool) -> Amounts:
        key = _key(bucket, alike)
        if key not in self._amounts:
            in_memory = self.rotation.ranks >= self.ranks
            held = amounts(bucket, self.algorithm, self.options, self.ranks, in_memory)
            self._amounts[key] = level(held, self.rotation.chunks) if alike else held
        return self._amounts[key]

    def _job(self, bucket: Bucket, rank: int, alike: bool) -> Timed:
        key = rank, _key(bucket, alike)
        if key not in self._timed:
            held = self._held(bucket, alike)
            self._timed[key] = timed(held, self.algorithm, rank, self.ranks, self.curves)
        return self._timed[key]


def _key(bucket: Bucket, alike: bool) -> Hashable:
    """What a bucket's cut depends on; in chunks of one size, not on where they begin."""
    return alike, tuple(
        (spec.numel, spec.codec, spec.feedback, 0 if alike else spec.rotation) for spec in bucket
    )
