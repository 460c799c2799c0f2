"""Learned levels of a sharded module's codecs (THESIS 5.6.2, Alg. 5.1): learned and shared out.

    1. each parameter has a learner: a rank with as large a shard of it as any
    2. the learner fits the levels to its shard of the weights, or of the averaged gradient
    3. all ranks get all levels: a sum, to which every rank but the learner adds zeros

The thesis learns on one GPU per layer, too. Levels are between the minimum and the maximum of a
block, so those of the averaged gradient serve for each rank's gradient: of what shapes its blocks,
only the noise differs.

Bytes sent per rank: 4 for each level, summed over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradwire.codecs import LearnedLevels, learning
from gradwire.errors import ConfigError
from gradwire.handles.fsdp import shard_lengths, shard_of
from gradwire.planner.learned import KINDS, Learned, learns
from gradwire.planner.plan import Plan
from gradwire.state.state import SavedJob, StateSection

if TYPE_CHECKING:
    from gradwire.handles.scatters import Scatters

_MOST = 64  # levels of a codec
_MISSING = -1.0  # in place of the first level: there is no gradient


@dataclass(frozen=True)
class Wanted:
    """Levels to be learned.

    Attributes:
        kind: "weights" or "gradients".
        learner: the replica 0's rank in the scatter group, that fits them.
    """

    kind: str
    name: str
    codec: LearnedLevels
    learner: int


def _wanted(
    plan: Plan, parameters: Mapping[str, Any], shards: int, smallest: int
) -> Iterator[Wanted]:
    """What a plan's codecs can learn; equal on all ranks.

    Args:
        parameters: FSDP's records, by name.
        smallest: values of a parameter that is worth it.
    """
    number = 0
    for p in plan.parameters:
        for kind, codec in (("gradients", learns(p.codec)), ("weights", learns(p.weight))):
            if codec is not None and p.numel >= smallest:
                lengths = shard_lengths(parameters[p.name], shards)
                largest = [rank for rank in range(shards) if lengths[rank] == max(lengths)]
                yield Wanted(kind, p.name, codec, largest[number % len(largest)])
                number += 1


def learned(on: Scatters, smallest: int, steps: int) -> Learned:
    """The levels; collective. See `Handle.learn_levels`."""
    if on.groups.scatter is None or not on.installed:
        raise ConfigError(
            "learn_levels: this handle does not scatter the module's gradients (any more): attach "
            "to the module itself"
        )
    targets = list(_wanted(on.plan, on.records, on.groups.shards, smallest))
    if not targets and not on.plan.rules.uncompiled:
        raise ConfigError(
            f"learn_levels: no parameter of {smallest} values or more is sent through "
            '"learnedlevels": attach with "learnedlevels:rounding=stochastic" for gradients or '
            'weights="learnedlevels", or give a lower `smallest`'
        )
    if not targets:
        return Learned()
    with ExitStack() as told:
        for comm in on.comms():
            told.enter_context(comm.busy("learns levels"))
        return _fitted(on, targets, steps)


def _fitted(on: Scatters, targets: list[Wanted], steps: int) -> Learned:
    table = torch.zeros(len(targets), _MOST, dtype=torch.float32)
    for row, target in zip(table, targets, strict=True):
        if on.groups.replica == 0 and target.learner == on.groups.shard:
            parameter = on.records[target.name].sharded_param
            _fit(row, target, parameter, steps, on.check_owners)
    on.summed(table.view(-1))
    found: dict[str, dict[str, tuple[float, ...]]] = {kind: {} for kind in KINDS}
    for row, target in zip(table.tolist(), targets, strict=True):
        if row[0] != _MISSING:
            found[target.kind][target.name] = tuple(row[: 2**target.codec.bits])
    missed = [t.name for t in targets if t.kind == "gradients" and t.name not in found[t.kind]]
    if missed and not found["gradients"]:
        raise ConfigError(
            f"learn_levels: {missed[0]} has no gradient to learn from: call it after backward, "
            "before zero_grad"
        )
    return Learned(**found)


def _fit(
    row: torch.Tensor,
    target: Wanted,
    parameter: torch.Tensor,
    steps: int,
    check: Callable[[], object],
) -> None:
    """Write the levels of this rank's shard into a row of the table."""
    values = parameter if target.kind == "weights" else parameter.grad
    if values is None:
        row[0] = _MISSING
        return
    codec = target.codec
    even = LearnedLevels(codec.bits, codec.block, codec.rounding).grid
    stochastic = codec.rounding == "stochastic"
    levels = learning.learn(shard_of(values), even, codec.block, stochastic, steps, 0, check)
    row[: 2**codec.bits] = torch.tensor(levels, dtype=row.dtype)


def levels_section(on: Scatters) -> StateSection:
    """Of the levels in force."""

    def save() -> dict[str, Any]:
        levels = on.plan.levels
        return {} if levels == Learned() else {"levels": levels.state()}

    def loading(job: SavedJob) -> Callable[[], None]:
        levels = Learned.of(job.states[0].get("levels"))
        return lambda: on.use_levels(lambda _: levels)

    return StateSection(save, loading, ("levels",))
