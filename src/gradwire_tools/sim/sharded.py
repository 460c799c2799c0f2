"""Predict one step of training under FSDP2: gathers of weights, reduce-scatters of gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.collectives import Options, Part, check_feedback
from gradwire.engine import Kind
from gradwire.errors import ConfigError
from gradwire_tools.sim import models
from gradwire_tools.sim.curves import Curves
from gradwire_tools.sim.ensemble import Ensemble
from gradwire_tools.sim.models import Shapes
from gradwire_tools.sim.predict import SimulatedStep, check_seconds
from gradwire_tools.sim.rank import Overheads, SimulatedRank, TimedGraph
from gradwire_tools.sim.run import simulate
from gradwire_tools.sim.shards import (
    GATHER,
    HOP,
    SCATTER,
    Gathered,
    Gradients,
    Torch,
    Weights,
    by_torch,
    gathered,
    hopped,
    lengths,
    placed,
    scattered,
)
from gradwire_tools.sim.task_times import algorithm_on
from gradwire_tools.sim.training import StepCollective, Times, TrainingThread, order

_BACKWARD = {"none": "gather", "redraw": "gather", "payload": "decode", "reference": ""}


@dataclass(frozen=True)
class ShardedScenario(SimulatedStep):
    """A step under FSDP2; the algorithm is "sra" or "hierarchical".

    With replicas (HSDP) the ranks of a node shard the model, and nodes replicate it.

    Attributes:
        weights, gradients: how they are sent.
        groups: the blocks of the model, then its root, which may be empty; see `models.groups`.
        forward: seconds of computing. Blocks share them, as those of backward, by their values;
            the root takes none.
        blocking: whether the host waits where it starts a collective, as FSDP2 does on a CPU: but
            for gathers of gradwire in backward.
        replicas: of the model.
        hop: how gradients are sent between replicas; None: as `gradients`.
        accumulate: micro-batches per step, with replicas; the others are seconds of one.
        deferred: whether replicas are averaged in the last micro-batch alone.

    Raises:
        ConfigError: error feedback or an algorithm that is not defined for these, or a number out
            of range.
    """

    weights: Weights
    gradients: Gradients
    groups: tuple[Shapes, ...]
    forward: float = 0.0
    blocking: bool = False
    replicas: int = 1
    hop: Gradients | None = None
    accumulate: int = 1
    deferred: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seconds("forward", self.forward)
        for name, number in (("replicas", self.replicas), ("accumulate", self.accumulate)):
            if number < 1:
                raise ConfigError(f"{name}={number}: give a number of at least 1")
        if self.replicas > 1 and self.per_node * self.replicas != self.ranks:
            raise ConfigError(
                f"replicas={self.replicas}: each is a machine, so of {self.ranks} ranks per_node "
                f"is {self.ranks / self.replicas:g}, not {self.per_node}"
            )
        if self.replicas == 1 and (self.accumulate > 1 or not self.deferred):
            raise ConfigError("accumulate and undeferred are for steps with replicas: give those")
        for operation in (GATHER, SCATTER):
            algorithm_on(self.options, self.shards, self.per_node, operation)
        if self.feedback and not isinstance(self.gradients, Torch):
            check_feedback(self.gradients)

    @property
    def shards(self) -> int:
        """Ranks that hold a replica."""
        return self.ranks // self.replicas

    @property
    def between(self) -> Gradients:
        """How gradients are sent between replicas."""
        return self.gradients if self.hop is None else self.hop

    @property
    def hops(self) -> list[bool]:
        """Of each micro-batch, whether replicas are averaged."""
        early, last = not self.deferred, self.replicas > 1
        return [early] * (self.accumulate - 1) + [last]

    @property
    def keep(self) -> str:
        """What ranks keep of forward's weights; see `Coded`."""
        return "none" if isinstance(self.weights, Torch) else self.weights.keep

    @property
    def is_torch(self) -> bool:
        """Whether nothing goes through gradwire."""
        return isinstance(self.weights, Torch) and isinstance(self.gradients, Torch)


def predict_sharded(scenario: ShardedScenario, curves: Curves) -> dict[str, Any]:
    """Simulate one step.

    Returns:
        A row: numel, algorithm, ranks, per_node, net, groups, seconds (from the start of forward
        until the last rank has its last gradient), forward_seconds, backward_seconds,
        compute_seconds (kernel time of the busiest rank), wire_bytes (sent by rank 0),
        weights_wire_bytes and gradients_wire_bytes (the same, by kind), with replicas replicas,
        accumulate, deferred, and replicas_wire_bytes (of the latter), ratio (bytes of the same
        step by torch in fp32 / wire_bytes), limit_seconds (bytes that leave a node / rate, and at
        least forward and backward; None without a rate), of_limit, messages (sent by rank 0), exact
        (as of `predict`).

    Raises:
        ConfigError: a codec has no curve.
    """
    n = scenario.shards
    curves = scenario.checked(curves)
    gathers = {
        number: gathered(group, scenario.weights, n)
        for number, group in enumerate(scenario.groups)
        if group
    }
    times = _times(scenario, curves, gathers)
    in_backward = _BACKWARD[scenario.keep]
    prefetches = not isinstance(scenario.weights, Torch)
    steps, actions = order(times, in_backward, scenario.blocking, prefetches, scenario.hops)
    represented, graphs = _graphs(scenario, curves, steps, gathers)
    free = {"overheads": Overheads()} if scenario.is_torch else {}
    # In flight: two of gathers, two of reduce-scatters.
    machines = scenario.machines(curves, in_flight=4, **free)
    threads: list[TrainingThread] = []

    def begin(rank: SimulatedRank, mine: Sequence[TimedGraph]) -> None:
        thread = TrainingThread(rank, steps, [[[graph]] for graph in mine], actions)
        threads.append(thread)
        rank.clock.at(0.0, thread.go_on)

    ranks, fabric = simulate(machines, graphs, begin, represented)
    ended = [thread.ended for thread in threads if thread.ended is not None]
    assert len(ended) == len(ranks), "a rank never finishes"
    kept = sum(of.decode for of in times[:-1] if of is not None and in_backward == "decode")
    own = zip(ranks, threads, strict=True)
    sent = {"gather": 0, "reduce": 0}
    between = 0
    for job, nbytes in ranks[0].sent_bytes.items():
        sent[steps[job].lane] += nbytes
        between += nbytes * steps[job].hop
    wire = sum(sent.values())
    computing = scenario.accumulate * (scenario.forward + scenario.backward)
    replicas = {"accumulate": scenario.accumulate, "deferred": scenario.deferred}
    replicas |= {"replicas": scenario.replicas, "replicas_wire_bytes": between}
    return {
        "numel": sum(map(models.numel, scenario.groups)),
        "groups": sum(map(bool, scenario.groups)),
        **scenario.row(max(ended), computing, fabric.moved[0]),
        "forward_seconds": scenario.forward,
        "blocking": scenario.blocking,
        "compute_seconds": max(rank.kernel_seconds + t.kernel_seconds for rank, t in own)
        + scenario.accumulate * kept,
        "wire_bytes": wire,
        "weights_wire_bytes": sent["gather"],
        "gradients_wire_bytes": sent["reduce"],
        **(replicas if scenario.replicas > 1 else {}),
        "ratio": _uncompressed(scenario) / wire if wire else 1.0,
        "messages": sum(graph.graph.kind.count(Kind.SEND) for graph in graphs[0]),
        "exact": represented == 1,
    }


def _times(
    scenario: ShardedScenario, curves: Curves, gathers: Mapping[int, Gathered]
) -> list[Times | None]:
    """Of every group."""
    values = sum(map(models.numel, scenario.groups[:-1]))
    times: list[Times | None] = []
    for number, group in enumerate(scenario.groups):
        is_root = number == len(scenario.groups) - 1
        share = 0.0 if is_root and values else models.numel(group) / (values or 1)
        passes = scenario.forward * share, scenario.backward * share
        times.append(Times(*passes, *gathers[number].seconds(curves)) if group else None)
    return times


def _graphs(
    scenario: ShardedScenario,
    curves: Curves,
    steps: Sequence[StepCollective],
    gathers: Mapping[int, Gathered],
) -> tuple[int, list[list[TimedGraph]]]:
    """As of `Ensemble.graphs`, of the steps' collectives."""
    if scenario.replicas > 1:
        return 1, _with_replicas(scenario, curves, steps, gathers)
    n, parts, torchs = scenario.ranks, [], []
    for one in steps:
        operation, is_torch = GATHER, isinstance(scenario.weights, Torch)
        if one.lane == "gather":
            specs = gathers[one.group].bucket
        else:
            operation, is_torch = SCATTER, isinstance(scenario.gradients, Torch)
            group = scenario.groups[one.group]
            specs = scattered(group, scenario.gradients, scenario.feedback, n)
        torchs.append(is_torch)
        options = Options(segments=1) if is_torch else scenario.options
        parts.append(Part(operation, specs, options, torch.device("cpu")))
    represented, graphs = Ensemble(n, scenario.per_node, curves).graphs(parts, scenario.exact)
    return represented, [
        [
            by_torch(timed, part.specs, n) if of_torch else timed
            for timed, part, of_torch in zip(mine, parts, torchs, strict=True)
        ]
        for mine in graphs
    ]


def _with_replicas(
    scenario: ShardedScenario,
    curves: Curves,
    steps: Sequence[StepCollective],
    gathers: Mapping[int, Gathered],
) -> list[list[TimedGraph]]:
    """Of every rank, the graphs of the steps' collectives: among the shards of its replica, which
    are on its node, and with the same shard of the other replicas."""
    shards, inside = scenario.shards, Ensemble(scenario.shards, scenario.shards, curves)
    hops = Ensemble(scenario.replicas, 1, curves)
    graphs: list[list[TimedGraph]] = []
    for rank in range(scenario.ranks):
        replica, shard = divmod(rank, shards)
        beside, same = (
            range(rank - shard, rank - shard + shards),
            range(shard, scenario.ranks, shards),
        )
        mine = []
        for one in steps:
            group = scenario.groups[one.group]
            how: Weights | Gradients = scenario.gradients
            ensemble, at, among, operation = inside, shard, beside, SCATTER
            if one.hop:
                how, ensemble, at, among, operation = scenario.between, hops, replica, same, HOP
                specs = hopped(group, scenario.between, scenario.feedback, shards, shard)
            elif one.lane == "gather":
                how, operation, specs = scenario.weights, GATHER, gathers[one.group].bucket
            else:
                specs = scattered(group, scenario.gradients, scenario.feedback, shards)
            options = scenario.options.through("sra") if one.hop else scenario.options
            options = Options(segments=1) if isinstance(how, Torch) else options
            part = Part(operation, specs, options, torch.device("cpu"))
            timed = ensemble.graph(part, at)
            if isinstance(how, Torch):
                timed = by_torch(timed, specs, ensemble.ranks)
            mine.append(placed(timed, among))
        graphs.append(mine)
    return graphs


def _uncompressed(scenario: ShardedScenario) -> int:
    """Bytes that rank 0 sends in this step through torch's collectives in fp32."""
    shards, replicas = scenario.shards, scenario.replicas
    each = [4 * sum(lengths(s, shards)[0] for s in group) for group in scenario.groups]
    inside = scenario.accumulate * (shards - 1) * (3 * sum(each) - each[-1])
    return inside + sum(scenario.hops) * 2 * (replicas - 1) * sum(each) // replicas
