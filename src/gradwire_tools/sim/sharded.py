"""Predict one step of training under FSDP2: gathers of weights, reduce-scatters of gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradwire.collectives import Options, check_feedback
from gradwire.engine import Kind
from gradwire_tools.sim import models
from gradwire_tools.sim.buckets import Bucket
from gradwire_tools.sim.curves import Curves
from gradwire_tools.sim.ensemble import Ensemble
from gradwire_tools.sim.models import Shapes
from gradwire_tools.sim.predict import SimulatedStep, check_seconds
from gradwire_tools.sim.rank import Overheads, SimulatedRank, TimedGraph
from gradwire_tools.sim.run import simulate
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
from gradwire_tools.sim.training import StepCollective, Times, TrainingThread, order

_BACKWARD = {"none": "gather", "redraw": "gather", "payload": "decode", "reference": ""}


@dataclass(frozen=True)
class ShardedScenario(SimulatedStep):
    """A step under FSDP2; the algorithm is "sra" or "hierarchical".

    Attributes:
        weights, gradients: how they are sent.
        groups: the blocks of the model, then its root, which may be empty; see `models.groups`.
        forward: seconds of computing. Blocks share them, as those of backward, by their values;
            the root takes none.
        blocking: whether the host waits where it starts a collective, as FSDP2 does on a CPU: but
            for gathers of gradwire in backward.

    Raises:
        ConfigError: error feedback or an algorithm that is not defined for these, or a number out
            of range.
    """

    weights: Weights
    gradients: Gradients
    groups: tuple[Shapes, ...]
    forward: float = 0.0
    blocking: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seconds("forward", self.forward)
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
    curves = with_bytes(scenario.checked(curves))
    gathers = {
        number: gathered(group, scenario.weights, n)
        for number, group in enumerate(scenario.groups)
        if group
    }
    times = _times(scenario, curves, gathers)
    in_backward = _BACKWARD[scenario.keep]
    prefetches = not isinstance(scenario.weights, Torch)
    steps, actions = order(times, in_backward, scenario.blocking, prefetches)
    rotation, graphs = _graphs(scenario, curves, steps, gathers)
    free = {"overheads": Overheads()} if scenario.is_torch else {}
    # In flight: two of gathers, two of reduce-scatters.
    machines = scenario.machines(curves, in_flight=4, **free)
    threads: list[TrainingThread] = []

    def begin(rank: SimulatedRank, mine: Sequence[TimedGraph]) -> None:
        thread = TrainingThread(rank, steps, mine, actions)
        threads.append(thread)
        rank.clock.at(0.0, thread.go_on)

    ranks, fabric = simulate(machines, graphs, begin, rotation)
    ended = [thread.ended for thread in threads if thread.ended is not None]
    assert len(ended) == len(ranks), "a rank never finishes"
    kept = sum(of.decode for of in times[:-1] if of is not None and in_backward == "decode")
    own = zip(ranks, threads, strict=True)
    sent = {"gather": 0, "reduce": 0}
    for job, nbytes in ranks[0].sent_bytes.items():
        sent[steps[job].lane] += nbytes
    wire = sum(sent.values())
    computing = scenario.forward + scenario.backward
    return {
        "numel": sum(map(models.numel, scenario.groups)),
        "groups": sum(map(bool, scenario.groups)),
        **scenario.row(max(ended), computing, fabric.moved[0]),
        "forward_seconds": scenario.forward,
        "blocking": scenario.blocking,
        "compute_seconds": max(rank.kernel_seconds + t.kernel_seconds for rank, t in own) + kept,
        "wire_bytes": wire,
        "weights_wire_bytes": sent["gather"],
        "gradients_wire_bytes": sent["reduce"],
        "ratio": _uncompressed(scenario) / wire if wire else 1.0,
        "messages": sum(graph.graph.kind.count(Kind.SEND) for graph in graphs[0]),
        "exact": rotation is None,
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
) -> tuple[Symmetry | None, list[list[TimedGraph]]]:
    """(the rotation, or None; the graphs of each simulated rank, by job)."""
    n, per_node, gradients = scenario.ranks, scenario.per_node, scenario.gradients

    def lane(name: str, exact: bool | None) -> tuple[Symmetry | None, list[list[TimedGraph]]]:
        """The same of a lane's jobs."""
        groups = [one.group for one in steps if one.lane == name]
        if name == "gather":
            operation, is_torch = GATHER, isinstance(scenario.weights, Torch)
            buckets = [gathers[group].bucket for group in groups]
        else:
            operation, is_torch = SCATTER, isinstance(gradients, Torch)
            shapes = [scenario.groups[group] for group in groups]
            buckets = [scattered(of, gradients, scenario.feedback, n) for of in shapes]
        options = Options(segments=1) if is_torch else scenario.options
        algorithm = algorithm_on(options, n, per_node, operation)
        known = _free(curves, buckets) if is_torch else curves
        ensemble = Ensemble(n, per_node, algorithm, options, known, operation)
        rotation, graphs = ensemble.jobs(buckets, exact)
        if is_torch:
            graphs = [list(map(by_torch, mine, buckets)) for mine in graphs]
        return rotation, graphs

    found = {name: lane(name, scenario.exact) for name in ("gather", "reduce")}
    if found["gather"][0] != found["reduce"][0]:
        found = {name: lane(name, True) for name in found}
    graphs = []
    for of_rank in zip(*(graphs for _, graphs in found.values()), strict=True):
        mine = dict(zip(found, map(iter, of_rank), strict=True))
        graphs.append([next(mine[one.lane]) for one in steps])
    return found["gather"][0], graphs


def _free(curves: Curves, buckets: list[Bucket]) -> Curves:
    """Curves in which the codecs of these buckets take no time."""
    forms = curves.codecs["Identity()"]
    nothing = dict.fromkeys(forms, (0.0, 0.0, 0.0))
    of = {str(spec.codec): nothing for bucket in buckets for spec in bucket}
    return replace(curves, codecs={**curves.codecs, **of})


def _uncompressed(scenario: ShardedScenario) -> int:
    """Bytes that rank 0 sends in this step through torch's collectives in fp32."""
    each = [4 * sum(lengths(s, scenario.ranks)[0] for s in group) for group in scenario.groups]
    return (scenario.ranks - 1) * (3 * sum(each) - each[-1])
