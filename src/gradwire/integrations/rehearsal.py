"""Rehearsal: what a plan will run, prepared before its first pass.

The scopes of a pass are formed as they will be, from the buckets of the last pass; aggregators go
through their rounds on zeros, with fresh state; and nothing is sent: a collective leaves its values
as they are. So layouts are compiled and agreed on, and kernels loaded, while another plan runs.

Ranks agree on layouts, so all must rehearse the same buckets: DDP's change with its second forward,
and ranks are there at different times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from gradwire.aggregators import Attached, rehearsed
from gradwire.collectives import Collective
from gradwire.control import digest
from gradwire.engine import Owner
from gradwire.integrations.gather import Gather, Split
from gradwire.planner import Plan

if TYPE_CHECKING:
    from gradwire.integrations.buckets import Content


class Known(Protocol):
    """Parameters that travel together, and how many values of each."""

    @property
    def members(self) -> Sequence[Attached]: ...
    @property
    def lengths(self) -> Sequence[int]: ...


K = TypeVar("K", bound=Known)

_ATTEMPTS = 50
_PAUSE_S = 0.1  # between two


def alike(owner: Owner, name: str, contents: Callable[[], Sequence[K]]) -> Sequence[K]:
    """What travelled together in the last pass, once all ranks have had the same; none if they have
    not for some seconds: then a plan's first pass prepares what it runs.

    Args:
        name: of the exchange, used once.
    """
    member = owner.comm.member
    if member is None:
        return contents()
    for attempt in range(_ATTEMPTS):
        mine = contents()
        text = [
            f"{m.name}: {numel}"
            for c in mine
            for m, numel in zip(c.members, c.lengths, strict=True)
        ]
        number = digest(len(mine), "buckets", text)
        found = member.exchange(f"{name}/buckets {attempt}", f"{number:x}".encode()).result()
        if len(set(found)) == 1:
            return mine
        time.sleep(_PAUSE_S)
    return ()


def rehearse(
    owner: Owner, plan: Plan, contents: Sequence[Content], members: Mapping[str, Attached]
) -> list[Collective]:
    """The collectives that `plan` runs in a pass over buckets of these contents, being prepared."""
    aggregators = {p.name: p.aggregator for p in plan.parameters}
    gather = Gather(plan.coalesce_bytes)
    found = []
    for number, content in enumerate(contents):
        split = Split.of([aggregators[member.name] for member in content.members])
        for shares in gather.add(split, content.nbytes, number == len(contents) - 1):
            scope, gradients = [], []
            for share in shares:
                of = contents[share.bucket]
                for place in share.places:
                    member, numel = of.members[place], of.lengths[place]
                    scope.append(members[member.name].understudy(aggregators[member.name]))
                    gradients.append(torch.zeros(numel, dtype=of.dtype, device=of.device))
            found += rehearsed(owner, scope, gradients, plan.options)
    return found
