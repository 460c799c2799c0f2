"""Predict one row: a model, a codec and an algorithm on given ranks and links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from gradwire.aggregators import Aggregator, registry
from gradwire.collectives import Options
from gradwire.engine import Kind
from gradwire.errors import ConfigError
from gradwire.lang import Codec
from gradwire.planner.plan import Plan, make_plan
from gradwire.planner.rules import Rules
from gradwire_tools.sim import models
from gradwire_tools.sim.buckets import DdpScope, ddp_scopes, priced
from gradwire_tools.sim.curves import Curves
from gradwire_tools.sim.ensemble import Ensemble
from gradwire_tools.sim.fabric import Link
from gradwire_tools.sim.rank import SimulatedRank, TimedGraph
from gradwire_tools.sim.run import Machines, simulate


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
        codec: a codec or an aggregator, for all parameters that are matrices; the others are sent
            uncompressed.
        model: as `models.shapes` takes it, or shapes.
        barrier: whether ranks start as they leave a barrier that rank 0 reached last, as in `bench
            collectives`, rather than all at once. In gloo's barrier rank r signals rank r + 2^k.
        least: matrices of fewer values are sent uncompressed.
        coalesce_bytes: as of `gradwire.attach`.
        bucket_bytes: at which DDP closes a bucket; None: at 1 MiB the first, the others at 25.

    Raises:
        ConfigError: an unknown model, a codec that is not defined in the algorithm, an aggregator
            that compresses no parameter, or a number out of range.
    """

    codec: Codec | Aggregator
    model: str | models.Shapes
    barrier: bool = False
    least: int = 0
    coalesce_bytes: int = 0
    bucket_bytes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        nodes = self.options.nodes
        if nodes is not None and len(nodes) != self.ranks:
            raise ConfigError(f"nodes={nodes}: give the node of each of the {self.ranks} ranks")
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes={self.bucket_bytes}: give a number of at least 1")
        _ = self.plan

    @property
    def shapes(self) -> models.Shapes:
        """The parameters' shapes, in order."""
        return models.shapes(self.model) if isinstance(self.model, str) else self.model

    @property
    def plan(self) -> Plan:
        """As `gradwire.attach` would make it."""
        named = []
        for number, shape in enumerate(self.shapes):
            numel = math.prod(shape)  # what has one dimension is sent uncompressed
            kept = torch.empty(
                shape if numel >= self.least else numel, dtype=torch.float32, device="meta"
            )
            named.append((str(number), kept))
        rules = Rules(registry.get(self.codec), feedback=self.feedback)
        return make_plan(named, rules, self.ranks, self.options, self.coalesce_bytes)

    @property
    def scopes(self) -> list[DdpScope]:
        """What is averaged together. Raises ConfigError as `ddp_scopes`."""
        return ddp_scopes(self.plan, self.ranks, self.bucket_bytes)

    @property
    def priced(self) -> set[Codec | Aggregator]:
        """The codecs and aggregators of which curves are needed."""
        return priced(self.scopes)


def check_seconds(name: str, seconds: float) -> None:
    """Raise ConfigError unless it is a time."""
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{name}={seconds}: give a number of seconds, 0 or more")


def predict(scenario: Scenario, curves: Curves) -> dict[str, Any]:
    """Simulate the collectives of one step.

    Returns:
        A row: model, numel, algorithm, ranks, per_node, net, seconds (from the start of backward
        until the last rank has the last average), compute_seconds (time of kernels and
        aggregators on the busiest rank), wire_bytes (sent by rank 0), limit_seconds (bytes that
        leave its node / rate + rounds * latency, and at least backward; None without a rate),
        of_limit (limit_seconds / seconds), backward_seconds, buckets, messages (sent by rank 0),
        exact (whether every rank was simulated; otherwise one node represented all).

    Raises:
        ConfigError: a codec has no curve.
    """
    scopes, numel = scenario.scopes, models.numel(scenario.shapes)
    ready = [scenario.backward * scope.ready / numel for scope in scopes]
    found = averaged(scenario, scopes, scenario.checked(curves), ready, scenario.barrier)
    return {
        "model": scenario.model if isinstance(scenario.model, str) else "given shapes",
        "numel": numel,
        **scenario.row(found.seconds, scenario.backward, found.moved, found.rounds),
        "buckets": len(scopes),
        **found.keys,
    }


@dataclass(frozen=True)
class Averaged:
    """Simulated scopes.

    Attributes:
        seconds: until the last rank has the last average.
        moved: bytes that left node 0.
        rounds: messages that follow each other, of the scope that has the most.
        keys: compute_seconds, wire_bytes, messages and exact, as rows have them.
    """

    seconds: float
    moved: int
    rounds: int
    keys: dict[str, Any]


def averaged(
    step: SimulatedStep,
    scopes: Sequence[DdpScope],
    curves: Curves,
    ready: Sequence[float],
    barrier: bool = False,
) -> Averaged:
    """Simulate scopes that become ready at these seconds; `barrier` as of `Scenario`."""
    ensemble = Ensemble(step.ranks, step.per_node, curves)
    parts = [part for scope in scopes for part in scope.parts]
    represented, graphs = ensemble.graphs(parts, True if barrier else step.exact)
    computing = [scope.seconds(curves, step.ranks) for scope in scopes]
    # What aggregators compute before their first round, backward waits for.
    late = accumulate((seconds[0] for seconds in computing), initial=0.0)
    begun = [when + waited for when, waited in zip(ready, late, strict=False)]
    hop = step.net.latency_s + curves.link.overhead
    starts = [bin(rank).count("1") * hop * barrier for rank in range(len(graphs))]

    def begin(rank: SimulatedRank, mine: Sequence[TimedGraph]) -> None:
        left = iter(mine)
        for number, (when, scope) in enumerate(zip(begun, scopes, strict=True)):
            submit = partial(rank.submit, number, scope.timed(left), computing[number])
            rank.clock.at(starts[rank.number] + when, submit)

    ranks, fabric = simulate(step.machines(curves), graphs, begin, represented)
    assert all(len(rank.ended) == len(begun) for rank in ranks), "a rank never finishes"
    keys = {
        "compute_seconds": max(rank.kernel_seconds for rank in ranks),
        "wire_bytes": ranks[0].sent_bytes.total(),
        "messages": sum(timed.graph.kind.count(Kind.SEND) for timed in graphs[0]),
        "exact": represented == 1,
    }
    rounds = max(
        sum(max(map(ensemble.latencies, of_round)) for of_round in scope.rounds) for scope in scopes
    )
    seconds = max(end - starts[rank.number] for rank in ranks for end in rank.ended.values())
    return Averaged(seconds, fabric.moved[0], rounds, keys)
