"""Checks and plans FSDP2 modules, and attaches a handle to them once all ranks agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from gradwire.groups import communicator
from gradwire.integrations.fsdp import Groups
from gradwire.integrations.sharded import Sharded
from gradwire.integrations.sharded_plan import Trained, make_sharded_plan, trained_of
from gradwire.planner import Plan, Rules

_STEP_BITS = 32  # bits of a handle's step counter
# Each handle of a group draws different random numbers.
_counts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


@dataclass(frozen=True)
class PlannedShards:
    """FSDP modules that have passed the checks on this rank, and their plan."""

    model: torch.nn.Module
    trained: Trained
    plan: Plan

    def handle(self, seed: int) -> Sharded:
        """Attach; raises ConfigError if ranks disagree."""
        groups = self.trained.groups
        count = _counts[groups.all[0]] = _counts.get(groups.all[0], 0) + 1
        agreed = [f"seed {seed}", f"handle {count} on sharded modules of this group"]
        for group in groups.all:
            communicator(group).agree("what is attached", [*agreed, *self.plan.describe()])
        return Sharded(self.model, self.trained, self.plan, seed, count << _STEP_BITS)


def plan_sharded(
    model: torch.nn.Module,
    rules: Rules,
    like: Groups | None = None,
    ours: Callable[[dist.ProcessGroup], bool] = lambda _: True,
) -> PlannedShards:
    """Check and plan every FSDP module in `model` on this rank, before ranks agree.

    Args:
        like: skip modules over other process groups than these, and modules that cannot have a
            handle.
        ours: whether gradients over a process group are compressed.

    Raises:
        ConfigError: a module cannot have a handle, modules use several process groups, an
            aggregator is not a single codec, or as `make_plan`.
    """
    trained = trained_of(model, like, ours)
    return PlannedShards(
        model, trained, make_sharded_plan(trained.named, rules, trained.groups.size)
    )
