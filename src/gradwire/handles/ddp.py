"""Checks and plans DDP modules, and attaches a handle to them once all ranks agree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.collectives import Options
from gradwire.errors import ConfigError
from gradwire.groups import communicator
from gradwire.handles.arguments import Decides
from gradwire.handles.bias import warn_of_bias
from gradwire.handles.buckets import Buckets
from gradwire.handles.handle import Handle
from gradwire.handles.hook import hook_state
from gradwire.handles.oversights import check_module
from gradwire.handles.uncompiled import available
from gradwire.handles.wrapped import original, plain_names
from gradwire.planner import Plan, Rules, make_plan
from gradwire.planner.files import PlanFile
from gradwire.state.formats import StateGather
from gradwire.state.state import members_of

COALESCE_BYTES = 1 << 18


@dataclass(frozen=True)
class Planned:
    """A DDP module that has passed the checks on this rank, and its plan."""

    model: DistributedDataParallel
    named: list[tuple[str, torch.Tensor]]
    plan: Plan

    def handle(
        self,
        seed: int,
        decides: Decides = Decides(),  # noqa: B008
        call: str = "gw.attach",
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Handle:
        """Attach as the user's `call`; raises ConfigError if ranks disagree, or a policy has no
        choice.

        Args:
            optimizer: for cross-barrier training.
        """
        comm, state = communicator(self.model.process_group), hook_state(self.model)
        agreed = [f"seed {seed}", f"after {state.attached} handles of this module"]
        agreed += decides.describe()
        agreed += [] if optimizer is None else [f"cross_barrier of {type(optimizer).__name__}"]
        plan, device = self.plan, self.named[0][1].device
        plan = available(plan, self._planned, device, [comm], decides)
        comm.agree("the call of gw.attach", [*agreed, *plan.describe()])
        warn_of_bias(plan, comm.world_size, call)
        name = comm.handle_name(original(self.model.module), self.named[0][0])
        owner = comm.owner(f"the {name}")
        unused = self.model.find_unused_parameters
        members = members_of(plan, seed, comm.rank, state.attached, unused)
        state.attached += 1
        of = self.model, state, self.named, plan, members, owner
        reductions = Buckets(*of, optimizer)
        made = Handle(reductions, seed, comm.rank, StateGather([self.model.process_group]))
        if not plan.rules.uncompiled:  # else there is nothing to choose from
            decides.start(reductions)
        return made

    def _planned(self, rules: Rules) -> Plan:
        of = self.model.process_group.size(), self.plan.options, self.plan.coalesce_bytes
        return make_plan(self.named, rules, *of)


def plan_ddp(
    model: DistributedDataParallel,
    rules: Rules,
    options: Options | None = None,
    coalesce_bytes: int | None = None,
    pinned: PlanFile | None = None,
) -> Planned:
    """Check a module and plan it on this rank, before ranks agree.

    Args:
        pinned: the file that has the rules.

    Raises:
        ConfigError: no handle can be attached to this module.
    """
    check_module(model)
    named = synchronised(model)
    device = named[0][1].device
    away = next(((n, p.device) for n, p in named if p.device != device), None)
    if away is not None or device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"parameter {named[0][0]} is on {device}" + (", {} on {}".format(*away) if away else "")
            + ": all parameters must be on the CPU, or on one GPU"
        )  # fmt: skip
    if pinned is not None:
        pinned.check(named)
    whole = getattr(model, "skip_all_reduce_unused_params", False)
    size = model.process_group.size()
    held = COALESCE_BYTES if coalesce_bytes is None else coalesce_bytes
    plan = make_plan(named, rules, size, options, 0 if whole else held)
    if whole and any(p.aggregator.scope == "model" for p in plan.parameters):
        raise ConfigError(
            "an aggregator over the whole model needs all of its gradients: wrap the module "
            "without skip_all_reduce_unused_params"
        )
    hook_state(model)  # last, since a hook cannot be unregistered
    return Planned(model, named, plan)


def synchronised(model: DistributedDataParallel) -> list[tuple[str, torch.Tensor]]:
    """Names and parameters in the module's order; a tied parameter comes with each of its names.
    Names are without what torch.compile and activation checkpointing add.

    DDP selects them when it wraps the module: a parameter frozen later stays in its bucket, one
    unfrozen later gets no bucket. So this asks the reducer, and ignores `requires_grad`.

    Raises:
        ConfigError: a parameter was removed from the module.
    """
    # The buckets have zeros in place of gradients; this memory is released at once.
    buckets = model.reducer._get_zeros_like_grad_buckets()
    kept = {p for bucket in buckets for p in bucket.parameters()}
    every = plain_names(model.module.named_parameters(remove_duplicate=False))
    named = [(name, p) for name, p in every if p in kept]
    gone = kept - {p for _, p in named}
    if gone:
        raise ConfigError(
            "DDP synchronises parameters that are no longer in the module, of shapes "
            f"{sorted(tuple(p.shape) for p in gone)}: wrap the module after changing it"
        )
    return named
