"""Predict steps of DDP that do not wait for their last averages (`attach(cross_barrier=True)`).

    with the barrier     forward, backward, and a wait for all averages
    without it           the next forward waits, bucket by bucket, as it comes to their parameters

Layers share forward and backward by their values. Scopes beyond `eager` wait for the end of
backward, and go in the order of the forward, if steps are faster so; `eager` is counted in a step
with the barrier, as gradwire.handles.urgency does. What optimizers take is not counted, in either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire_tools.sim.buckets import DdpScope, ddp_buckets
from gradwire_tools.sim.clock import Cores
from gradwire_tools.sim.curves import Curves
from gradwire_tools.sim.ensemble import Ensemble
from gradwire_tools.sim.predict import Scenario, check_seconds, predict
from gradwire_tools.sim.rank import WINDOW, SimulatedRank, TimedGraph
from gradwire_tools.sim.run import simulate
from gradwire_tools.sim.training import StepAction, StepCollective, TrainingThread

_SETTLING, _COUNTED = 2, 4  # steps

Marks = list[float]  # when a training thread came to each


@dataclass(frozen=True)
class DdpSteps:
    """Steps that follow each other, of one rank.

    Attributes:
        scopes: of a step, in the order in which they become ready.
        computing: seconds of each one's aggregators; the training thread takes the first.
        buckets: values of each, in the same order.
        forward, backward: seconds of computing, per step.
    """

    scopes: Sequence[DdpScope]
    computing: Sequence[Sequence[float]]
    buckets: Sequence[int]
    forward: float
    backward: float

    def jobs(self, steps: int) -> list[StepCollective]:
        """The collectives of so many steps, each in a lane of its own."""
        each = range(len(self.scopes))
        return [
            StepCollective(scope, f"{step}/{scope}", computing=self.computing[scope])
            for step in range(steps)
            for scope in each
        ]

    def actions(self, steps: int, crosses: bool, eager: int | None = None) -> Iterator[StepAction]:
        """What the training thread does: it marks when each step begins, when its backward ends,
        and at last when the next would begin.

        Args:
            crosses: whether it goes without the barrier.
            eager: scopes that start as they become ready; None: all.
        """
        count = len(self.scopes)
        for step in range(steps):
            yield StepAction("mark")
            yield from self._forward((step - 1) * count if crosses and step else None)
            yield from self._backward(step * count, count if eager is None else eager)
            yield StepAction("mark")
            if not crosses:
                yield from (StepAction("wait", step * count + scope) for scope in range(count))
        yield StepAction("mark")

    def _forward(self, before: int | None) -> Iterator[StepAction]:
        """The last bucket has the first layers; `before`: the first job that is waited for."""
        for number in reversed(range(len(self.buckets))):
            for scope, of in enumerate(self.scopes):
                if before is not None and number in of.buckets:
                    yield StepAction("wait", before + scope)
            share = self.buckets[number] / sum(self.buckets)
            yield StepAction("compute", seconds=self.forward * share)

    def _backward(self, first: int, eager: int) -> Iterator[StepAction]:
        """`first`: the job of the first scope."""
        ready = 0
        for scope, of in enumerate(self.scopes):
            share = (of.ready - ready) / sum(self.buckets)
            ready = of.ready
            yield StepAction("compute", seconds=self.backward * share)
            if scope < eager:
                yield from self._start(first, scope)
        for scope in reversed(range(eager, len(self.scopes))):
            yield from self._start(first, scope)

    def _start(self, first: int, scope: int) -> Iterator[StepAction]:
        yield StepAction("start", first + scope)
        yield StepAction("compute", seconds=self.computing[scope][0])


def predict_crossing(scenario: Scenario, forward: float, curves: Curves) -> dict[str, Any]:
    """Simulate steps with the barrier and without it.

    Args:
        forward: seconds of computing before backward.

    Returns:
        The row of `predict`, but for: cross_barrier (true), forward_seconds, barrier_seconds and
        seconds (a step with the barrier and without it, means of steps that follow each other),
        limit_seconds and of_limit (of a step without it).

    Raises:
        ConfigError: as `predict`, or `forward` is no time.
    """
    check_seconds("forward", forward)
    row = predict(scenario, curves)
    known = scenario.checked(curves)
    scopes = scenario.scopes
    values = [sum(p.numel for p in b) for b in ddp_buckets(scenario.plan, scenario.bucket_bytes)]
    computing = [scope.seconds(known, scenario.ranks) for scope in scopes]
    of = DdpSteps(scopes, computing, values, forward, scenario.backward)
    parts = [part for scope in scopes for part in scope.parts]
    ensemble = Ensemble(scenario.ranks, scenario.per_node, known)
    represented, graphs = ensemble.graphs(parts, scenario.exact)

    steps = _SETTLING + _COUNTED
    jobs = of.jobs(steps)

    def walk(crosses: bool, eager: int | None = None) -> list[tuple[SimulatedRank, Marks]]:
        threads: list[TrainingThread] = []
        actions = [*of.actions(steps, crosses, eager)]

        def begin(rank: SimulatedRank, mine: Sequence[TimedGraph]) -> None:
            left = iter(mine)
            rounds = [scope.timed(left) for scope in scopes] * steps
            # As in `predict`, backward takes none of the ranks' cores.
            thread = TrainingThread(rank, jobs, rounds, actions, Cores(rank.clock))
            threads.append(thread)
            rank.clock.at(0.0, thread.go_on)

        ranks, _ = simulate(scenario.machines(known), graphs, begin, represented)
        assert all(thread.ended is not None for thread in threads), "a rank never finishes"
        return [(rank, thread.marks) for rank, thread in zip(ranks, threads, strict=True)]

    barrier = walk(crosses=False)
    eager = WINDOW + max(_ended(*one, len(scopes)) for one in barrier)
    orders = [None, eager] if eager < len(scopes) - 1 else [None]
    seconds = min(_mean(walk(True, order)) for order in orders)
    limit = row["limit_seconds"]
    limit = None if limit is None else max(limit, forward + scenario.backward)
    return {
        **row,
        "cross_barrier": True,
        "seconds": seconds,
        "barrier_seconds": _mean(barrier),
        "forward_seconds": forward,
        "limit_seconds": limit,
        "of_limit": None if limit is None or not seconds else limit / seconds,
    }


def _ended(rank: SimulatedRank, marks: Marks, count: int) -> int:
    """Of a step's scopes, the most that had ended as its backward did."""
    found = Counter(
        job // count for job, at in rank.ended.items() if at <= marks[1::2][job // count]
    )
    return max(found.values(), default=0)


def _mean(walked: Sequence[tuple[SimulatedRank, Marks]]) -> float:
    """Seconds per step, from the beginning of one to that of the next, on the slowest rank."""
    begun: list[float] = [max(at) for at in zip(*(marks[::2] for _, marks in walked), strict=True)]
    return (begun[-1] - begun[_SETTLING]) / _COUNTED
