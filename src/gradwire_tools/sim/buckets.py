"""What DDP's hook averages together: scopes of buckets, the last parameters first, and the rounds
of collectives that their aggregators ask for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from gradwire.aggregators import Aggregator, Attached, Dense, rounds_of
from gradwire.collectives import AllReduce, Options, Part
from gradwire.errors import ConfigError
from gradwire.handles.coalescing import Coalescing, Split
from gradwire.lang import Codec, rng
from gradwire.lang.exact import Exact
from gradwire.planner.plan import ParameterPlan, Plan
from gradwire_tools.sim.curves import Curves
from gradwire_tools.sim.rank import TimedGraph

# DDP closes a bucket when it reaches its size limit. The first is small, so that sending starts
# early.
_FIRST_BYTES = 1 << 20
_BYTES = 25 << 20
STEADY = 1 << 20  # a step after any warm-up
_MOST = 1 << 30  # values of a scope whose aggregator runs on zeros


@dataclass(frozen=True)
class DdpScope:
    """Parameters that are averaged together.

    Attributes:
        ready: how many values of the model have gradients once all of theirs are there.
        members: the parameters.
        rounds: their collectives, round by round.
        buckets: those that they are from, by number.
    """

    ready: int
    members: tuple[ParameterPlan, ...]
    rounds: tuple[tuple[Part, ...], ...]
    buckets: tuple[int, ...] = ()

    @property
    def parts(self) -> list[Part]:
        """The collectives of all rounds."""
        return [*itertools.chain(*self.rounds)]

    @property
    def computing(self) -> list[ParameterPlan]:
        """The members whose aggregators compute outside of kernels."""
        heavy = [p for p in self.members if p.inner != Dense()]
        return [p for p in heavy if p.codec is None or p.inner.scope == "model"]

    def timed(self, graphs: Iterator[TimedGraph]) -> list[list[TimedGraph]]:
        """The next of a rank's graphs, round by round."""
        return [[next(graphs) for _ in of_round] for of_round in self.rounds]

    def seconds(self, curves: Curves, ranks: int) -> list[float]:
        """What aggregators compute before each round, and after the last.

        Raises:
            ConfigError: an aggregator has no curves.
        """
        seconds = [0.0] * (len(self.rounds) + 1)
        for p in self.computing:
            for number, (call, value, rank) in enumerate(curves.of_aggregator(p.aggregator)):
                # A scope has fewer rounds than the aggregator where none of its matrices shrinks.
                place = min(number, len(self.rounds))
                seconds[place] += call + p.numel * (value + ranks * rank)
        return seconds


def ddp_buckets(plan: Plan, most_bytes: int | None = None) -> list[list[ParameterPlan]]:
    """The parameters of each bucket; `most_bytes` closes one, or DDP's own numbers, where None."""
    buckets: list[list[ParameterPlan]] = [[]]
    for parameter in reversed(plan.parameters):
        usual = _BYTES if len(buckets) > 1 else _FIRST_BYTES
        if _nbytes(buckets[-1]) >= (most_bytes or usual):
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def ddp_scopes(plan: Plan, world_size: int, most_bytes: int | None = None) -> list[DdpScope]:
    """The scopes of fp32 gradients under a plan, in the order in which they are started.

    Args:
        most_bytes: as of `ddp_buckets`.

    Raises:
        ConfigError: an aggregator asks for what is not legal, or its scope is too large to run it
            on zeros.
    """
    buckets = ddp_buckets(plan, most_bytes)
    coalescing, ready, found = Coalescing(plan.coalesce_bytes), 0, []
    for bucket in buckets:
        ready += sum(p.numel for p in bucket)
        split = Split.of([p.aggregator for p in bucket])
        for shares in coalescing.add(split, _nbytes(bucket), bucket is buckets[-1]):
            members = tuple(buckets[of.bucket][place] for of in shares for place in of.places)
            scope = scope_of(ready, members, world_size, plan.options)
            found.append(replace(scope, buckets=tuple(of.bucket for of in shares)))
    return found


def priced(scopes: Sequence[DdpScope]) -> set[Codec | Aggregator]:
    """The codecs and aggregators of which curves are needed."""
    specs = [spec for scope in scopes for part in scope.parts for spec in part.specs]
    codecs = {spec.codec for spec in specs if not isinstance(spec.codec, Exact)}
    return codecs | {p.aggregator for scope in scopes for p in scope.computing}


def _nbytes(parameters: Sequence[ParameterPlan]) -> int:
    return sum(p.numel * p.dtype.itemsize for p in parameters)


@lru_cache(maxsize=256)
def scope_of(
    ready: int, planned: tuple[ParameterPlan, ...], world_size: int, options: Options
) -> DdpScope:
    """With what rank 0, and so every rank, asks for. Raises ConfigError as `ddp_scopes`."""
    heavy = DdpScope(ready, planned, ()).computing
    if sum(p.numel for p in heavy) > _MOST:
        raise ConfigError(
            f"{heavy[0].inner}: a scope of more than {_MOST} values is not simulated, since it "
            "would need its memory: give a smaller model"
        )
    members = [
        Attached(
            p.name, p.shape, p.aggregator, rng.parameter_keys(0, p.name, 0), p.rotation, STEADY
        )
        for p in planned
    ]
    # Of numpy, which leaves pages alone that nothing touches.
    zeros = [AllReduce(torch.from_numpy(np.zeros(p.numel, "f4"))) for p in planned]
    rounds = rounds_of(members, zeros, options, 0, world_size)
    return DdpScope(ready, planned, tuple(one.parts for one in rounds))
