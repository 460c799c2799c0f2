"""What DDP's hook averages together: scopes of buckets, the last parameters first, and the rounds
of collectives that their aggregators ask for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch

from gradwire.aggregators import (
    Aggregator,
    Attached,
    Dense,
    Encoded,
    ErrorFeedback,
    rounds_of,
)
from gradwire.collectives import AllReduce, Options, Part
from gradwire.errors import ConfigError
from gradwire.handles.coalescing import Coalescing, Split
from gradwire.lang import rng
from gradwire.planner.plan import ParameterPlan, Plan
from gradwire_tools.sim.curves import Curves

# DDP closes a bucket when it reaches its size limit. The first is small, so that sending starts
# early.
_FIRST_BYTES = 1 << 20
_BYTES = 25 << 20
STEADY = 1 << 20  # a step after any warm-up
_MOST = 1 << 30  # values of a scope whose aggregator runs on zeros


@dataclass(frozen=True)
class Scope:
    """Parameters that are averaged together.

    Attributes:
        ready: how many values of the model have gradients once all of theirs are there.
        numels: of each aggregator that computes, the numbers of values of its parameters.
        rounds: their collectives, round by round.
    """

    ready: int
    numels: tuple[tuple[Aggregator, tuple[int, ...]], ...]
    rounds: tuple[tuple[Part, ...], ...]

    def computing(self, curves: Curves, ranks: int) -> list[float]:
        """The seconds that aggregators compute before each round, and after the last.

        Raises:
            ConfigError: an aggregator has no curves.
        """
        seconds = [0.0] * (len(self.rounds) + 1)
        for aggregator, numels in self.numels:
            for number, (call, value, rank) in enumerate(curves.of_aggregator(aggregator)):
                # A scope has fewer rounds than the aggregator where none of its matrices shrinks.
                place = min(number, len(self.rounds))
                seconds[place] += len(numels) * call + sum(numels) * (value + ranks * rank)
        return seconds


def computes(aggregator: Aggregator) -> bool:
    """Whether an aggregator computes outside of its collectives' kernels."""
    inner = aggregator.inner if isinstance(aggregator, ErrorFeedback) else aggregator
    return not ((isinstance(inner, Encoded) and inner.scope == "layer") or inner == Dense())


def ddp_scopes(plan: Plan, world_size: int) -> list[Scope]:
    """The scopes of fp32 gradients under a plan, in the order in which they are started.

    Raises:
        ConfigError: an aggregator asks for what is not legal, or its scope is too large to run it
            on zeros.
    """
    buckets: list[list[ParameterPlan]] = [[]]
    for parameter in reversed(plan.parameters):
        if _nbytes(buckets[-1]) >= (_BYTES if len(buckets) > 1 else _FIRST_BYTES):
            buckets.append([])
        buckets[-1].append(parameter)
    ready = list(accumulate(sum(p.numel for p in bucket) for bucket in buckets))
    coalescing, found = Coalescing(plan.coalesce_bytes), []
    for number, bucket in enumerate(buckets):
        split = Split.of([p.aggregator for p in bucket])
        for shares in coalescing.add(split, _nbytes(bucket), number == len(buckets) - 1):
            members = tuple(buckets[of.bucket][place] for of in shares for place in of.places)
            numels = defaultdict(list)
            for p in members:
                if computes(p.aggregator):
                    numels[p.aggregator].append(p.numel)
            served = tuple((aggregator, tuple(of)) for aggregator, of in numels.items())
            if sum(map(sum, numels.values())) > _MOST:
                raise ConfigError(
                    f"{next(iter(numels))}: a scope of more than {_MOST} values is not simulated, "
                    "since it would need its memory: give a smaller model"
                )
            found.append(Scope(ready[number], served, _rounds(members, world_size, plan.options)))
    return found


def _nbytes(parameters: Sequence[ParameterPlan]) -> int:
    return sum(p.numel * p.dtype.itemsize for p in parameters)


@lru_cache(maxsize=256)
def _rounds(
    planned: Sequence[ParameterPlan], world_size: int, options: Options
) -> tuple[tuple[Part, ...], ...]:
    """What rank 0, and so every rank, asks for."""
    members = [
        Attached(
            p.name, p.shape, p.aggregator, rng.parameter_keys(0, p.name, 0), p.rotation, STEADY
        )
        for p in planned
    ]
    # Of numpy, which leaves pages alone that nothing touches.
    zeros = [AllReduce(torch.from_numpy(np.zeros(p.numel, "f4"))) for p in planned]
    return tuple(one.parts for one in rounds_of(members, zeros, options, 0, world_size))
