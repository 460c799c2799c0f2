"""When a policy decides, and within which error.

    decision   every `every` passes, on the averages of the last `average` ones
    check      CHECKS times per period, on a quarter as many: the plan's error over the uniform
               plan's, on the same averages, against what it was when the plan was chosen. Where it
               has grown by `stale`, the policy decides on the check's averages, and at once

Checks sum as many passes per period as a decision, and look at two choices per parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradwire.codecs.checks import integer, number, one_of
from gradwire.controllers.error import METRICS
from gradwire.controllers.policy import Policy
from gradwire.errors import ConfigError

WEIGHTS = ("bytes", "priority", "time")
CHECKS = 5  # a period is divided into so many; its end has a decision instead


@dataclass(frozen=True)
class Replan:
    """When a policy decides, and within which error.

    Args:
        policy: a policy, or its name with options.
        every: passes between two decisions (THESIS 4.5: the evaluation period).
        first: passes before the first one; give more than the steps in which the learning rate
            warms up. None: `every`.
        average: passes whose averaged gradients are summed for a decision.
        alpha: the budget: so many times the uniform plan's error.
        metric: "l2" or "squared"; see gradwire/controllers/error.py.
        share: of one core, that tables may take in the background.
        stale: decide early once the plan's error, over the uniform plan's on the same averages, is
            so many times what it was when the plan was chosen. None: only every `every` passes.
        mixed: choose among qsgd, topk and PowerSGD, around what `attach` was given and, of the
            others, 4 bits, density 0.01 and rank 4. It needs error feedback. Errors of a single
            step do not see what error feedback repairs: compare a run's loss with that of one
            family.
        weigh: what a policy that compares bytes takes for a layer's cost: "bytes"; by "priority",
            times the number of its bucket (THESIS B.1); or by "time", times what a byte of its
            bucket was measured to cost (decide/weighing.py). The latter two are for DDP.

    Raises:
        ConfigError: a number out of range.
    """

    policy: Policy | str = "lgreco"
    every: int = 500
    first: int | None = None
    average: int = 20
    alpha: float = 1.0
    metric: str = "l2"
    share: float = 0.25
    stale: float | None = 1.2
    mixed: bool = False
    weigh: str = "bytes"

    def __post_init__(self) -> None:
        for name in ("every", "average", *([] if self.first is None else ["first"])):
            integer(self, name, 1)
        if self.average > min(self.every, self.begins):
            raise ConfigError(
                f"Replan: average={self.average}: at most every={self.every}, and first="
                f"{self.begins}"
            )
        one_of(self, "mixed", (False, True))
        one_of(self, "weigh", WEIGHTS)
        one_of(self, "metric", METRICS)
        number(self, "alpha", above=0, below=math.inf)
        number(self, "share", above=0, most=1)
        if self.stale is not None:
            number(self, "stale", above=1, below=math.inf)

    @property
    def begins(self) -> int:
        """Passes before the first decision."""
        return self.every if self.first is None else self.first

    @property
    def check_passes(self) -> int:
        """Passes whose averages are summed for a check."""
        return max(1, self.average // 4)

    def decides(self, number: int) -> bool:
        """Whether a decision's window ends with this pass."""
        return self._to_decision(number) == 0

    def checks(self, number: int) -> bool:
        """Whether a check's window ends with this pass."""
        return self._to_check(number) == 0

    def sums(self, number: int) -> bool:
        """Whether this pass belongs to a window."""
        check = self._to_check(number)
        in_check = check is not None and check < self.check_passes
        return in_check or self._to_decision(number) < self.average

    def _to_decision(self, number: int) -> int:
        """Passes until the next decision's window ends."""
        left = self.begins - number
        return left if left >= 0 else left % self.every

    def _to_check(self, number: int) -> int | None:
        """Passes until the next check's window ends; None: there is none before the next decision's
        window, or too few passes between checks."""
        between = self.every // CHECKS
        if self.stale is None or number <= self.begins or between < self.check_passes:
            return None
        place = (number - self.begins) % self.every
        left = -place % between
        return left if place > 0 and place + left <= self.every - self.average else None
