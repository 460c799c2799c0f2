"""A plain module in a single process: its handle has nothing to send, and leaves gradients alone.

So a script runs unchanged where it is started without a launcher, or with one rank, and where its
trainer then wraps no module. Passes are counted, so an update comes into force, and saved steps go
on with any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from gradwire.aggregators import Attached, Observation
from gradwire.collectives import Options, ScopeProgram
from gradwire.engine import Communicator, GroupInfo
from gradwire.errors import ConfigError
from gradwire.handles.arguments import Decides
from gradwire.handles.backward import Backward
from gradwire.handles.handle import Handle
from gradwire.handles.reductions import Reductions
from gradwire.handles.summary import Expected, expected_all_reduce
from gradwire.handles.wrapped import plain_names
from gradwire.planner import Plan, Rules, make_plan
from gradwire.planner.files import PlanFile
from gradwire.state.formats import StateGather
from gradwire.state.state import members_of


class Alone(Reductions):
    """The passes of a module that reduces nothing.

    Args:
        model: a module.
        named: its parameters that are trained, by name.
        plan: the first one.
        members: the parameters' states, by name.
    """

    what = "a module in a single process"
    idle = True

    def __init__(
        self,
        model: torch.nn.Module,
        named: Sequence[tuple[str, torch.Tensor]],
        plan: Plan,
        members: Mapping[str, Attached],
    ) -> None:
        comm = Communicator(_no_transport, info=GroupInfo(0, 1, 0.0, dist.HashStore()))
        super().__init__(plan, members, [comm.owner("a module in a single process")], 1)
        self._named = named
        self._backward = Backward(self._passed, _nothing, self.after_forward, lambda _: True)
        self._backward.watch(model)

    def _passed(self) -> None:
        self._least = self._version
        self.begin()
        for member in self.members.values():
            member.step += 1

    def planned(self, plan: Plan, rules: Rules) -> Plan:
        return plan_alone(self._named, rules, plan.options, plan.coalesce_bytes, plan.version)

    def changed(self, plan: Plan, given: Mapping[str, Any]) -> Plan:
        held = given.get("coalesce_bytes", plan.coalesce_bytes)
        return replace(plan, coalesce_bytes=held)

    def rehearse(self, plan: Plan) -> Sequence[ScopeProgram]:
        return ()

    def learn(self, smallest: int, steps: int) -> int:
        return 0

    def observe(self, observer: Callable[[Observation], None]) -> Callable[[], None]:
        return _nothing

    def expected(self) -> Expected:
        return expected_all_reduce(self.switch.plan, self.owner.comm)

    def remove(self) -> None:
        super().remove()
        self._backward.unwatch()
        self.close()


def plan_alone(
    named: Sequence[tuple[str, torch.Tensor]],
    rules: Rules,
    options: Options | None = None,
    coalesce_bytes: int = 0,
    version: int = 0,
) -> Plan:
    """Plan a module as one rank of DDP does.

    Raises:
        ConfigError: as `make_plan`; or a method works on gradients where nothing is sent, too.
    """
    plan = make_plan(named, rules, 1, options, coalesce_bytes, version)
    for p in plan.parameters:
        if p.inner.serves_one_rank and getattr(p.inner, "momentum", None):
            raise ConfigError(
                f"parameter {p.name}: {p.inner} takes the place of the optimizer's momentum, which "
                "a plain module does not get: wrap it in DistributedDataParallel, or use momentum=0"
            )
    return plan


def attach_alone(
    model: torch.nn.Module,
    rules: Rules,
    of: tuple[Any, ...],
    seed: int,
    pinned: PlanFile | None,
    decides: Decides,
) -> Handle:
    """Attach to a plain module in a single process.

    Args:
        of: options and coalesce_bytes.
        pinned: the plan's file, if it is of one.
        decides: what would change the plan where there are several ranks.
    """
    every = plain_names(model.named_parameters(remove_duplicate=False))
    named = [(name, p) for name, p in every if p.requires_grad]
    if pinned is not None:
        pinned.check(named)
    plan = plan_alone(named, rules, *of)
    decides.check(plan, lambda other: plan_alone(named, other, *of))
    members = members_of(plan, seed, 0, 0)

    def install(plan: Plan) -> Alone:
        return Alone(model, named, plan, members)

    return Handle(install(plan), seed, 0, StateGather([]), install=install)


def _no_transport() -> Any:
    raise AssertionError("a single process sends nothing")


def _nothing() -> None:
    pass
