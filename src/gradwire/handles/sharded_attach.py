"""Checks and plans FSDP2 modules, and attaches a handle to them once all ranks agree."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from gradwire.codecs import Identity
from gradwire.collectives import Options
from gradwire.engine import Communicator, ranks_of
from gradwire.groups import communicator
from gradwire.handles.arguments import Decides
from gradwire.handles.bias import warn_of_bias
from gradwire.handles.fsdp import Groups, gather_group, parameter_groups, process_groups
from gradwire.handles.handle import Handle
from gradwire.handles.scatters import Scatters
from gradwire.handles.sharded_plan import (
    Trained,
    check_gathers,
    check_nodes,
    make_sharded_plan,
    trained_of,
)
from gradwire.handles.uncompiled import available
from gradwire.handles.wrapped import original
from gradwire.lang import layout
from gradwire.planner import Plan, Rules, WeightRules
from gradwire.planner.files import PlanFile
from gradwire.state.formats import StateGather
from gradwire.state.state import members_of

SHARE = 0.25  # of free memory, for payloads of weights that are kept unless `keep` is given
# Handles of a group so far.
_counts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


@dataclass(frozen=True)
class PlannedShards:
    """FSDP modules that have passed the checks on this rank, and their plan."""

    model: torch.nn.Module
    trained: Trained
    plan: Plan

    def handle(
        self,
        seed: int,
        decides: Decides = Decides(),  # noqa: B008
        call: str = "gw.attach",
    ) -> Handle:
        """Attach, with a policy or none, as the user's `call`; raises ConfigError if ranks
        disagree, or the policy has no choice."""
        groups, plan = self.trained.groups, self.plan
        count = _counts.get(groups.all[0], 0) + 1
        agreed = [f"seed {seed}", f"handle {count} on sharded modules of this group"]
        agreed += decides.describe()
        comms = _comms(groups, self.trained.records[0], plan.weights is not None)
        device = self.trained.records[0].device
        plan = available(plan, self._planned, device, comms, decides)
        agreed += plan.describe()
        ranks_of(comms).agree("agreement", "the call of gw.attach", agreed).result()
        if plan.weights is not None and plan.weights.keep is None:
            none = "" if payloads_fit(self.trained, plan) else "none"
            fit = ranks_of(comms).tell("whether payloads of weights fit", none).result()
            keep = max(fit) or "payload"
            plan = replace(plan, weights=replace(plan.weights, keep=keep))
        _counts[groups.all[0]] = count
        warn_of_bias(plan, groups.size, call)
        members = members_of(plan, seed, groups.rank, count)
        name = comms[0].handle_name(original(self.model), plan.parameters[0].name)

        def install(plan: Plan) -> Scatters:
            return Scatters(self.model, self.trained, plan, members, seed, f"the sharded {name}")

        gather = StateGather(process_groups(self.trained.records[0]).all)
        scatters = install(plan)
        if not plan.rules.uncompiled:  # else there is nothing to choose from
            decides.start(scatters)
        return Handle(scatters, seed, groups.rank, gather, install)

    def _planned(self, rules: Rules) -> Plan:
        of, plan = self.trained, self.plan
        return make_sharded_plan(
            of.named, rules, of.groups.size, weights=plan.weights, options=plan.options
        )


def comms_of(model: torch.nn.Module, gathers: bool) -> list[Communicator]:
    """Over which ranks agree on a call of `attach` that may fail before it has a plan.

    Args:
        gathers: whether weights are gathered through codecs.
    """
    _, record = next(parameter_groups(model))
    return _comms(process_groups(record), record, gathers)


def _comms(groups: Groups, record: Any, gathers: bool) -> list[Communicator]:
    gathered = [gather_group(record)] if gathers else []
    return [communicator(group) for group in dict.fromkeys([*groups.all, *gathered])]


def payloads_fit(trained: Trained, plan: Plan) -> bool:
    """Whether all ranks' payloads of weights take at most `SHARE` of this rank's free memory."""
    nbytes = sum(
        layout(p.weight or Identity(), p.dtype).expected_nbytes(p.numel) for p in plan.parameters
    )
    return nbytes <= SHARE * free_bytes(trained.records[0].device)


def free_bytes(device: torch.device) -> float:
    """Memory that is free on a device; on the CPU, this rank's part of the machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        (line,) = re.findall(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
        found = 1024 * int(line)
    except (OSError, ValueError):  # no Linux
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return found / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def plan_sharded(
    model: torch.nn.Module,
    rules: Rules,
    like: Groups | None = None,
    ours: Callable[[dist.ProcessGroup], bool] = lambda _: True,
    weights: WeightRules | None = None,
    options: Options | None = None,
    pinned: PlanFile | None = None,
) -> PlannedShards:
    """Check and plan every FSDP module in `model` on this rank, before ranks agree.

    Args:
        like: skip modules over other process groups than these, and modules that cannot have a
            handle.
        ours: whether gradients over a process group are compressed.
        weights: how weights are gathered; None: by FSDP2.
        options: of the collectives.
        pinned: the file that has the rules.

    Raises:
        ConfigError: a module cannot have a handle, modules use several process groups, an
            aggregator is not a single codec, or as `make_plan`.
    """
    trained = trained_of(model, like, ours)
    if weights is not None:
        check_gathers(trained)
    check_nodes(options or Options(), trained.groups.shards)
    if pinned is not None:
        pinned.check(trained.named)
    plan = make_sharded_plan(
        trained.named, rules, trained.groups.size, weights=weights, options=options
    )
    return PlannedShards(model, trained, plan)
