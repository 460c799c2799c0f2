"""Rehearsal: prepares the programs of a new plan's scopes before its first pass.

The scopes are those of the last pass. So their programs are compiled and agreed on, and kernels
loaded, while the present plan runs.

Ranks agree on programs, so all must rehearse the same scopes. DDP rebuilds its buckets at its
second forward, which ranks reach at different times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from gradwire.aggregators import AHEAD, Attached, program_of
from gradwire.collectives import Request, ScopeProgram
from gradwire.control import digest
from gradwire.engine import Owner
from gradwire.planner import Plan


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
) -> tuple[Sequence[K], int]:
    """(the contents of the last pass, once they are equal on all ranks; the latest step of any
    rank). Empty after some seconds of differences: then the plan's first pass prepares its
    programs.

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
        step = max((m.step for c in mine for m in c.members), default=0)
        told = owner.ranks.tell(f"{name}/buckets", [number, step]).result(check)
        if len({buckets for buckets, _ in told}) == 1:
            return mine, max(latest for _, latest in told)
        time.sleep(_PAUSE_S)
    return (), 0


def rehearse(
    owner: Owner, plan: Plan, members: Sequence[Attached], reductions: Sequence[Request], step: int
) -> list[ScopeProgram]:
    """The programs of a scope in the steps from `step` on, alike on all ranks; those of later steps
    are made as they are met. `reductions` are of zeros."""
    if owner.comm.world_size == 1:
        return []
    aggregators = {p.name: plan.levels.aggregator(p) for p in plan.parameters}
    found = []
    for ahead in range(AHEAD):
        at = [m.at_first(aggregators[m.name], step + ahead) for m in members]
        found.append(program_of(owner, plan.version, at, reductions, plan.options))
    return [*dict.fromkeys(found)]
