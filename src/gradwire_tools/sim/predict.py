"""Predict one row: a model, a codec and an algorithm on given ranks and links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

from gradwire.algorithms import Hierarchical
from gradwire.collectives import Options, check_defined, check_feedback
from gradwire.engine import Kind
from gradwire.errors import ConfigError
from gradwire.lang import Codec
from gradwire_tools.sim import models
from gradwire_tools.sim.buckets import ddp_buckets
from gradwire_tools.sim.curves import Curves
from gradwire_tools.sim.ensemble import Ensemble
from gradwire_tools.sim.fabric import Link
from gradwire_tools.sim.rank import SimulatedRank, TimedGraph
from gradwire_tools.sim.run import Machines, simulate
from gradwire_tools.sim.task_times import algorithm_on


@dataclass(frozen=True)
class Net:
    """The nodes' links.

    Attributes:
        text: as the user wrote it.
        rate_bits_per_s: in each direction; `inf` for no limit.
        latency_s: one-way latency.
    """

    text: str
    rate_bits_per_s: float = math.inf
    latency_s: float = 0.0


@dataclass(frozen=True)
class SimulatedStep:
    """What simulated steps of all kinds have.

    Attributes:
        ranks: number of ranks.
        net: the network between nodes.
        options: algorithm, segments, partitions and so on; kernel options have no effect.
        feedback: whether residuals of gradients are kept.
        per_node: ranks per node; they share its link and communicate through memory.
        cores: number of cores that all ranks share; `inf`: one per thread.
        backward: seconds of the backward pass.
        exact: whether all ranks are simulated; None: if they are few.

    Raises:
        ConfigError: a number out of range.
    """

    ranks: int
    net: Net
    options: Options = field(default_factory=Options, kw_only=True)
    feedback: bool = field(default=False, kw_only=True)
    per_node: int = field(default=1, kw_only=True)
    cores: float = field(default=math.inf, kw_only=True)
    backward: float = field(default=0.0, kw_only=True)
    exact: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, number in (("ranks", self.ranks), ("per_node", self.per_node)):
            if number < 1:
                raise ConfigError(f"{name}={number}: give a number of at least 1")
        if not self.cores > 0:
            raise ConfigError(f"cores={self.cores}: give a number above 0")
        check_seconds("backward", self.backward)

    def checked(self, curves: Curves) -> Curves:
        """Curves that count the checksums of messages only where there are any."""
        checks = self.options.checksum
        if self.per_node < self.ranks if checks is None else checks:
            return curves
        return replace(curves, engine=replace(curves.engine, check_byte=0.0))

    def machines(self, curves: Curves, **given: Any) -> Machines:
        """What the ranks run on; `given` are fields of it."""
        rate, latency = self.net.rate_bits_per_s / 8, self.net.latency_s
        link = Link(rate=rate, latency=latency, **asdict(curves.link))
        of = {"overheads": curves.engine, "cores": self.cores, **given}
        return Machines(self.ranks, self.per_node, link, **of)

    def row(self, seconds: float, computing: float, moved: int, rounds: int = 0) -> dict[str, Any]:
        """The keys that rows of all kinds have.

        Args:
            seconds: of the step.
            computing: seconds that a step takes at least.
            moved: bytes that left node 0; with `rounds` of latency they take the link so long.
        """
        limit = None  # without a rate
        if not math.isinf(self.net.rate_bits_per_s):
            wire = moved * 8 / self.net.rate_bits_per_s + rounds * self.net.latency_s
            limit = max(computing, wire if moved else 0.0)
        return {
            "algorithm": self.options.algorithm,
            "ranks": self.ranks,
            "per_node": self.per_node,
            "net": self.net.text,
            "seconds": seconds,
            "backward_seconds": self.backward,
            "limit_seconds": limit,
            "of_limit": None if limit is None or not seconds else limit / seconds,
        }


@dataclass(frozen=True)
class Scenario(SimulatedStep):
    """The collectives of a step under DDP; gradients become ready at a constant rate in `backward`.

    Attributes:
        codec: for all parameters that are matrices; the others are sent uncompressed.
        model: as `models.shapes` takes it, or shapes.
        barrier: whether ranks start as they leave a barrier that rank 0 reached last, as in `bench
            collectives`, rather than all at once. In gloo's barrier rank r signals rank r + 2^k.
        least: matrices of fewer values are sent uncompressed.
        coalesce_bytes: as of `gradwire.attach`.

    Raises:
        ConfigError: an unknown model, a codec that is not defined in the algorithm, or a number
            out of range.
    """

    codec: Codec
    model: str | models.Shapes
    barrier: bool = False
    least: int = 0
    coalesce_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        nodes = self.options.nodes
        if nodes is not None and len(nodes) != self.ranks:
            raise ConfigError(f"nodes={nodes}: give the node of each of the {self.ranks} ranks")
        check_defined(self.options.algorithm, self.codec)
        if self.feedback:
            check_feedback(self.codec)
        _ = self.shapes

    @property
    def shapes(self) -> models.Shapes:
        """The parameters' shapes, in order."""
        return models.shapes(self.model) if isinstance(self.model, str) else self.model


def check_seconds(name: str, seconds: float) -> None:
    """Raise ConfigError unless it is a time."""
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{name}={seconds}: give a number of seconds, 0 or more")


def predict(scenario: Scenario, curves: Curves) -> dict[str, Any]:
    """Simulate the collectives of one step.

    Returns:
        A row: model, numel, algorithm, ranks, per_node, net, seconds (from the start of backward
        until the last rank has the last average), compute_seconds (kernel time of the busiest
        rank), wire_bytes (sent by rank 0), limit_seconds (bytes that leave its node / rate + rounds
        * latency, and at least backward; None without a rate), of_limit (limit_seconds / seconds),
        backward_seconds, buckets, messages (sent by rank 0), exact (whether every rank was
        simulated; otherwise one node represented all).

    Raises:
        ConfigError: a codec has no curve.
    """
    n = scenario.ranks
    sent = scenario.codec, scenario.feedback, n, scenario.least, scenario.coalesce_bytes
    buckets = ddp_buckets(scenario.shapes, *sent)
    algorithm = algorithm_on(scenario.options, n, scenario.per_node)
    curves = scenario.checked(curves)
    ensemble = Ensemble(n, scenario.per_node, algorithm, scenario.options, curves)
    rotation, jobs = ensemble.jobs(buckets, True if scenario.barrier else scenario.exact)
    numels = list(accumulate(sum(spec.numel for spec in bucket) for bucket in buckets))
    ready = [scenario.backward * done / numels[-1] for done in numels]
    hop = scenario.net.latency_s + curves.link.overhead
    starts = [bin(rank).count("1") * hop * scenario.barrier for rank in range(len(jobs))]

    def begin(rank: SimulatedRank, mine: Sequence[TimedGraph]) -> None:
        for job, (when, timed) in enumerate(zip(ready, mine, strict=True)):
            rank.clock.at(starts[rank.number] + when, partial(rank.submit, job, timed))

    ranks, fabric = simulate(scenario.machines(curves), jobs, begin, rotation)
    assert all(len(rank.ended) == len(ready) for rank in ranks), "a rank never finishes"
    seconds = max(end - starts[rank.number] for rank in ranks for end in rank.ended.values())
    rounds = algorithm.rounds(n)
    if isinstance(algorithm, Hierarchical):
        rounds = algorithm.rounds_between(n)
    return {
        "model": scenario.model if isinstance(scenario.model, str) else "given shapes",
        "numel": numels[-1],
        **scenario.row(seconds, scenario.backward, fabric.moved[0], rounds),
        "compute_seconds": max(rank.kernel_seconds for rank in ranks),
        "wire_bytes": ranks[0].sent_bytes.total(),
        "buckets": len(buckets),
        "messages": sum(job.graph.kind.count(Kind.SEND) for job in jobs[0]),
        "exact": rotation is None,
    }
