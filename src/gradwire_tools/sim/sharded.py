"""Predict one step of training under FSDP2: gathers of weights, reduce-scatters of gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.collectives import Options, Part, check_feedback
from gradwire.engine import Kind
from gradwire_tools.sim import models
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
)
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
    curves = scenario.checked(curves)
    gathers = {
        number: gathered(group, scenario.weights, n)
        for number, group in enumerate(scenario.groups)
        if group
    }
    times = _times(scenario, curves, gathers)
    in_backward = _BACKWARD[scenario.keep]
    prefetches = not isinstance(scenario.weights, Torch)
    steps, actions = order(times, in_backward, scenario.blocking, prefetches)
    represented, graphs = _graphs(scenario, curves, steps, gathers)
    free = {"overheads": Overheads()} if scenario.is_torch else {}
    # In flight: two of gathers, two of reduce-scatters.
    machines = scenario.machines(curves, in_flight=4, **free)
    threads: list[TrainingThread] = []

    def begin(rank: SimulatedRank, mine: Sequence[TimedGraph]) -> None:
        thread = TrainingThread(rank, steps, mine, actions)
        threads.append(thread)
        rank.clock.at(0.0, thread.go_on)

    ranks, fabric = simulate(machines, graphs, begin, represented)
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
            by_torch(timed, part.specs) if of_torch else timed
            for timed, part, of_torch in zip(mine, parts, torchs, strict=True)
        ]
        for mine in graphs
    ]


def _uncompressed(scenario: ShardedScenario) -> int:
    """Bytes that rank 0 sends in this step through torch's collectives in fp32."""
    each = [4 * sum(lengths(s, scenario.ranks)[0] for s in group) for group in scenario.groups]
    return (scenario.ranks - 1) * (3 * sum(each) - each[-1])
