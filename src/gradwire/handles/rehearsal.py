"""Rehearsal: prepares the collectives of a new plan before its first pass.

The scopes are formed from the buckets of the last pass. Aggregators go through their rounds on
zeros, with initial state, and nothing is sent: each collective leaves its values unchanged. So
layouts are compiled and agreed on, and kernels loaded, while the present plan runs.

Ranks agree on layouts, so all must rehearse the same buckets. DDP rebuilds its buckets at its
second forward, which ranks reach at different times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from gradwire.aggregators import Attached, rehearsed
from gradwire.collectives import AllReduce, Collective
from gradwire.control import digest
from gradwire.engine import Owner
from gradwire.handles.coalescing import Coalescing, Split
from gradwire.planner import Plan

if TYPE_CHECKING:
    from gradwire.handles.bucket import Content


class Known(Protocol):
    """Parameters that are sent together, with their numbers of values."""

    @property
    def members(self) -> Sequence[Attached]: ...
    @property
    def lengths(self) -> Sequence[int]: ...


K = TypeVar("K", bound=Known)

_ATTEMPTS = 50
_PAUSE_S = 0.1  # between two attempts


def alike(
    owner: Owner, name: str, contents: Callable[[], Sequence[K]], check: Callable[[], None]
) -> Sequence[K]:
    """The contents of the last pass, once they are equal on all ranks; empty after some seconds of
    differences: then the plan's first pass prepares its collectives.

    Args:
        name: of the exchange, unique.
        check: called while this rank waits; what it raises ends the wait.
    """
    for _ in range(_ATTEMPTS):
        mine = contents()
        text = [
            f"{m.name}: {numel}"
            for c in mine
            for m, numel in zip(c.members, c.lengths, strict=True)
        ]
        number = digest(len(mine), "buckets", text)
        if len(set(owner.ranks.tell(f"{name}/buckets", number).result(check))) == 1:
            return mine
        time.sleep(_PAUSE_S)
    return ()


def rehearse(
    owner: Owner, plan: Plan, contents: Sequence[Content], members: Mapping[str, Attached]
) -> list[Collective]:
    """Prepare the collectives that `plan` runs in a pass over buckets with these contents."""
    size = owner.comm.world_size
    steps = {step for p in plan.parameters for step in p.aggregator.steps_to_rehearse(size)}
    return [c for step in sorted(steps) for c in _step(owner, plan, contents, members, step)]


def _step(
    owner: Owner,
    plan: Plan,
    contents: Sequence[Content],
    members: Mapping[str, Attached],
    step: int,
) -> list[Collective]:
    """Prepare the collectives of one step."""
    aggregators = {p.name: p.aggregator for p in plan.parameters}
    coalescing = Coalescing(plan.coalesce_bytes)
    found = []
    for number, content in enumerate(contents):
        split = Split.of([aggregators[member.name] for member in content.members])
        for shares in coalescing.add(split, content.nbytes, number == len(contents) - 1):
            scope, reductions = [], []
            for share in shares:
                of = contents[share.bucket]
                for place in share.places:
                    member, numel = of.members[place], of.lengths[place]
                    scope.append(members[member.name].for_rehearsal(aggregators[member.name], step))
                    zeros = torch.zeros(numel, dtype=of.dtype, device=of.device)
                    reductions.append(AllReduce(zeros))
            found += rehearsed(owner, scope, reductions, plan.options)
    return found
