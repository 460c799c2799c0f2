"""A module that trains in a test: passes that take what the test says, and no gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradwire.planner import Plan, Rules, make_plan
from gradwire.planner.plan import ParameterPlan
from rooms.decide import Adaptation, DecidingRank, Make, Runner

NAMED = [("weight", torch.zeros(32, 64)), ("bias", torch.zeros(64))]


class Workers:
    """Runs what it is given at once, or when it is let."""

    def __init__(self) -> None:
        self.held = False
        self._tasks: deque[Callable[[], None]] = deque()

    def run(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        if not self.held:
            self.let()

    def let(self) -> None:
        while self._tasks:
            self._tasks.popleft()()


class Asked:
    """An update of a plan, which is prepared at once."""

    def __init__(self, module: Module, version: int, error: Exception | None) -> None:
        self.version, self._module, self._error = version, module, error

    @property
    def in_force(self) -> bool:
        return self._error is None and self._module.plan.version >= self.version

    def wait(self, timeout: float | None = None) -> None:
        if self._error is not None:
            raise self._error


class Module:
    """Rank 0 of several.

    Args:
        seconds: of a pass with a plan.
        told: what all ranks tell, given what this one does.
        refuses: why a requested plan is refused; None: it is not.
    """

    def __init__(
        self,
        seconds: Callable[[Plan], float] = lambda _: 1.0,
        told: Callable[[str, Any], list[Any]] = lambda key, mine: [mine, mine],
        refuses: Callable[[Plan], Exception | None] = lambda _: None,
        codec: str = "bf16",
    ) -> None:
        self.plan = self.newest = make_plan(NAMED, Rules().changed(codec=codec), 2)
        self.place = DecidingRank(0, 0, 2)
        self.adaptation: Adaptation | None = None
        self.decisions: list[dict[str, Any]] = []
        self.now = 0.0
        self.workers = Workers()
        self._seconds, self._told, self._refuses = seconds, told, refuses
        self.runner = Runner(self.workers, self._tell, self._ask, clock=lambda: self.now)  # type: ignore[arg-type]

    def train(self, passes: int) -> None:
        """In each pass the newest plan comes into force after the runner knows the pass before."""
        for _ in range(passes):
            window = None if self.adaptation is None else self.adaptation.ended()
            self.runner.begin(self.plan.version, None, window)
            if self.adaptation is not None:
                self.adaptation.begin()
            self.plan = self.newest
            if self.adaptation is not None:
                self.adaptation.add("weight", torch.ones(32, 64))
            self.now += self._seconds(self.plan)

    @property
    def weight(self) -> ParameterPlan:
        return self.plan.parameters[0]

    def _tell(self, key: str, mine: Any, check: Callable[[], None]) -> list[Any]:
        check()
        return self._told(key, mine)

    def _ask(self, make: Make) -> Any:
        before, made = self.newest, make(self.newest)
        error = self._refuses(made)
        self.newest = made if error is None else Plan(**{**vars(before), "version": made.version})
        return Asked(self, made.version, error)

    def remade(self, plan: Plan, rules: Rules) -> Plan:
        return make_plan(NAMED, rules, 2, plan.options, plan.coalesce_bytes, plan.version)

    def rewrite(self, change: Make) -> None:
        self.plan = self.newest = change(self.plan)

    def decided(self, row: Mapping[str, Any]) -> None:
        self.decisions.append(dict(row))

    def shard(self, name: str) -> torch.Tensor:
        raise NotImplementedError

    def bucket_names(self) -> list[list[str]]:
        return [["bias"], ["weight"]]
