"""Predict one step of training under FSDP2: gathers of weights, reduce-scatters of gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from gradwire.collectives import Options, check_feedback
from gradwire.engine import Kind
from gradwire_tools.sim import models
from gradwire_tools.sim.buckets import Bucket
from gradwire_tools.sim.curves import Curves
from gradwire_tools.sim.ensemble import Ensemble
from gradwire_tools.sim.models import Shapes
from gradwire_tools.sim.predict import Net, check_machines, check_seconds, checked, link_of
from gradwire_tools.sim.rank import Overheads, SimulatedRank, TimedGraph
from gradwire_tools.sim.run import Machines, simulate
from gradwire_tools.sim.shards import (
    GATHER,
    SCATTER,
    Gathered,
    Gradients,
    Torch,
    Weights,
    by_torch,
    gathered,
    lengths,
    scattered,
    with_bytes,
)
from gradwire_tools.sim.symmetry import Symmetry
from gradwire_tools.sim.task_times import algorithm_on
from gradwire_tools.sim.training import Action, StepCollective, Times, TrainingThread, Waits, order

_BACKWARD = {"none": "gather", "redraw": "gather", "payload": "decode", "reference": ""}


@dataclass(frozen=True)
class ShardedScenario:
    """What is simulated.

    Attributes:
        weights, gradients: how they are sent.
        groups: the blocks of the model, then its root, which may be empty; see `models.groups`.
        feedback: whether residuals of gradients are kept.
        forward, backward: seconds of computing in each pass. Blocks share them by their values;
            the root takes none.
        blocking: whether the host waits where it starts a collective, as FSDP2 does on a CPU: but
            for gathers of gradwire in backward.
        options: its algorithm is "sra" or "hierarchical".
        ranks, net, per_node, cores, exact: as of `Scenario`.

    Raises:
        ConfigError: error feedback or an algorithm that is not defined for these, or a number out
            of range.
    """

    ranks: int
    net: Net
    weights: Weights
    gradients: Gradients
    groups: tuple[Shapes, ...]
    feedback: bool = False
    forward: float = 0.0
    backward: float = 0.0
    blocking: bool = False
    options: Options = field(default_factory=Options)
    per_node: int = 1
    cores: float = math.inf
    exact: bool | None = None

    def __post_init__(self) -> None:
        check_machines(self.ranks, self.per_node, self.cores)
        check_seconds("forward", self.forward)
        check_seconds("backward", self.backward)
        for operation in (GATHER, SCATTER):
            algorithm_on(self.options, self.ranks, self.per_node, operation)
        if self.feedback and not isinstance(self.gradients, Torch):
            check_feedback(self.gradients)

    @property
    def keep(self) -> str:
        """What ranks keep of forward's weights; see `Coded`."""
        return "none" if isinstance(self.weights, Torch) else self.weights.keep

    @property
    def is_torch(self) -> bool:
        """Whether nothing goes through gradwire."""
        return isinstance(self.weights, Torch) and isinstance(self.gradients, Torch)


@dataclass(frozen=True)
class _Step:
    """What one rank does.

    Attributes:
        jobs, actions: see gradwire_tools.sim.training.
        gathers: of each group; None of an empty one.
    """

    jobs: list[StepCollective]
    actions: list[Action]
    gathers: list[Gathered | None]


def predict_sharded(scenario: ShardedScenario, curves: Curves) -> dict[str, Any]:
    """Simulate one step.

    Returns:
        A row: numel, algorithm, ranks, per_node, net, groups, seconds (from the start of forward
        until the last rank has its last gradient), forward_seconds, backward_seconds,
        compute_seconds (kernel time of the busiest rank), wire_bytes (sent by rank 0),
        weights_wire_bytes and gradients_wire_bytes (the same, by kind), ratio (bytes of the same
        step by torch in fp32 / wire_bytes), limit_seconds (bytes that leave a node / rate, and at
        least forward and backward; None without a rate), of_limit, messages (sent by rank 0), exact
        (as of `predict`).

    Raises:
        ConfigError: a codec has no curve.
    """
    n = scenario.ranks
    curves = with_bytes(checked(curves, scenario.options, in_memory=scenario.per_node >= n))
    step = _step(scenario, curves)
    rotation, graphs = _graphs(scenario, curves, step)
    machines = Machines(
        world_size=n,
        ranks=scenario.per_node,
        link=link_of(scenario.net, curves),
        overheads=Overheads() if scenario.is_torch else curves.engine,
        cores=scenario.cores,
        in_flight=4,  # two of gathers, two of reduce-scatters
    )
    threads: list[TrainingThread] = []

    def on(clock: Any, cores: Any) -> Any:
        def begin(rank: SimulatedRank, mine: Any) -> None:
            thread = TrainingThread(rank, clock, cores, step.jobs, mine, step.actions)
            threads.append(thread)
            clock.at(0.0, thread.go_on)

        return begin

    ranks, fabric = simulate(machines, graphs, on, rotation)
    ended = [thread.ended for thread in threads if thread.ended is not None]
    assert len(ended) == len(ranks), "a rank never finishes"
    kept = _decodes_kept(scenario, step, curves)
    own = zip(ranks, threads, strict=True)
    sent = {"gather": 0, "reduce": 0}
    for job, nbytes in ranks[0].sent_bytes.items():
        sent[step.jobs[job].lane] += nbytes
    wire = sum(sent.values())
    seconds, limit = max(ended), _limit(scenario, fabric.moved[0])
    return {
        "numel": sum(map(models.numel, scenario.groups)),
        "algorithm": scenario.options.algorithm,
        "ranks": n,
        "per_node": scenario.per_node,
        "net": scenario.net.text,
        "groups": sum(map(bool, scenario.groups)),
        "seconds": seconds,
        "forward_seconds": scenario.forward,
        "backward_seconds": scenario.backward,
        "blocking": scenario.blocking,
        "compute_seconds": max(rank.kernel_seconds + t.kernel_seconds for rank, t in own) + kept,
        "wire_bytes": wire,
        "weights_wire_bytes": sent["gather"],
        "gradients_wire_bytes": sent["reduce"],
        "ratio": _uncompressed(scenario) / wire if wire else 1.0,
        "limit_seconds": limit,
        "of_limit": None if limit is None or not seconds else limit / seconds,
        "messages": sum(graph.graph.kind.count(Kind.SEND) for graph in graphs[0]),
        "exact": rotation is None,
    }


def _step(scenario: ShardedScenario, curves: Curves) -> _Step:
    groups = scenario.groups
    gathers = [gathered(g, scenario.weights, scenario.ranks) if g else None for g in groups]
    values = sum(map(models.numel, groups[:-1]))
    times: list[Times | None] = []
    for number, (group, gather) in enumerate(zip(groups, gathers, strict=True)):
        if gather is None:
            times.append(None)
            continue
        is_root = number == len(groups) - 1
        share = 0.0 if is_root and values else models.numel(group) / (values or 1)
        kernels = gather.encode_seconds(curves), gather.decode_seconds(curves)
        times.append(Times(scenario.forward * share, scenario.backward * share, *kernels))
    ours = not isinstance(scenario.weights, Torch)
    return _Step(
        *order(times, _BACKWARD[scenario.keep], Waits(scenario.blocking, prefetches=ours)), gathers
    )


def _graphs(
    scenario: ShardedScenario, curves: Curves, step: _Step
) -> tuple[Symmetry | None, list[list[TimedGraph]]]:
    """(the rotation, or None; the graphs of each simulated rank, by job)."""
    n, per_node = scenario.ranks, scenario.per_node
    sends = {"gather": scenario.weights, "reduce": scenario.gradients}
    buckets: dict[str, list[Bucket]] = {"gather": [], "reduce": []}
    for job in step.jobs:
        gather = step.gathers[job.group]
        if job.lane == "reduce":
            group = scenario.groups[job.group]
            buckets["reduce"].append(scattered(group, scenario.gradients, scenario.feedback, n))
        elif gather is not None:
            buckets["gather"].append(gather.bucket)
    ensembles = {}
    for lane, operation in (("gather", GATHER), ("reduce", SCATTER)):
        by = isinstance(sends[lane], Torch)
        options = Options(segments=1) if by else scenario.options
        algorithm = algorithm_on(options, n, per_node, operation)
        timed = _free(curves, buckets[lane]) if by else curves
        ensembles[lane] = Ensemble(n, per_node, algorithm, options, timed, operation)
    found = {lane: of.jobs(buckets[lane], scenario.exact) for lane, of in ensembles.items()}
    rotation = found["gather"][0]
    if rotation != found["reduce"][0]:
        found = {lane: of.jobs(buckets[lane], True) for lane, of in ensembles.items()}
        rotation = None
    graphs = []
    for rank in range(len(found["gather"][1])):
        mine = {lane: list(by_rank[rank]) for lane, (_, by_rank) in found.items()}
        for lane, how in sends.items():
            if isinstance(how, Torch):
                mine[lane] = list(map(by_torch, mine[lane], buckets[lane]))
        of_lane = {lane: iter(some) for lane, some in mine.items()}
        graphs.append([next(of_lane[job.lane]) for job in step.jobs])
    return rotation, graphs


def _free(curves: Curves, buckets: list[Bucket]) -> Curves:
    """Curves in which the codecs of these buckets take no time."""
    forms = curves.codecs["Identity()"]
    nothing = dict.fromkeys(forms, (0.0, 0.0, 0.0))
    of = {str(spec.codec): nothing for bucket in buckets for spec in bucket}
    return replace(curves, codecs={**curves.codecs, **of})


def _decodes_kept(scenario: ShardedScenario, step: _Step, curves: Curves) -> float:
    """Seconds in which backward decodes payloads that forward kept."""
    if _BACKWARD[scenario.keep] != "decode":
        return 0.0
    return sum(of.decode_seconds(curves) for of in step.gathers[:-1] if of is not None)


def _uncompressed(scenario: ShardedScenario) -> int:
    """Bytes that rank 0 sends in this step through torch's collectives in fp32."""
    each = [4 * sum(lengths(s, scenario.ranks)[0] for s in group) for group in scenario.groups]
    return (scenario.ranks - 1) * (3 * sum(each) - each[-1])


def _limit(scenario: ShardedScenario, moved: int) -> float | None:
    if math.isinf(scenario.net.rate_bits_per_s):
        return None
    computing = scenario.forward + scenario.backward
    return max(computing, moved * 8 / scenario.net.rate_bits_per_s)
