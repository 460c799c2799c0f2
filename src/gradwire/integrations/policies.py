"""Starts what decides in the caller's place, on all ranks: a policy, or automatic mode."""

from __future__ import annotations

import logging
import math

from gradwire.controllers import Policy
from gradwire.errors import ConfigError
from gradwire.integrations.adaptation import Adaptation
from gradwire.integrations.auto import Auto, sent
from gradwire.integrations.automatic import Automatic
from gradwire.integrations.choices import policy_of
from gradwire.integrations.reductions import Reductions
from gradwire.integrations.replan import Replan

log = logging.getLogger("gradwire")


def adapt(
    on: Reductions,
    policy: Policy,
    replan: Replan,
    before: Adaptation | None = None,
    passes: int = 0,
) -> None:
    """Let a policy choose methods from now on.

    Args:
        before, passes: of a policy to be carried on, see `Adaptation`.

    Raises:
        ConfigError: there is no choice around the plan's methods.
    """
    of = on.owner, on.switch, on.remade, on.adopt
    more = {"record": on.decided, "before": before, "passes": passes, **on.for_policy()}
    adaptation = Adaptation(policy, replan, *of, **more)
    if on.ranks > 1:  # a single rank sends nothing
        on.adaptation = adaptation


def automate(on: Reductions, auto: Auto) -> None:
    """Let measurements choose the plan from now on."""
    plan = on.switch.plan
    named = sent(plan, on.planned(plan, plan.rules.changed(codec=None)))
    if not any(len(shape) > 1 and math.prod(shape) for _, shape in named):
        line = (
            "there is nothing to compress: include, exclude and codecs leave no matrix of fp32, "
            "fp16 or bf16; nothing is measured or tried"
        )
        on.decided({"by": "auto", "pass": 0, "line": line})
        if on.owner.comm.rank == 0:
            log.warning("auto: %s", line)
        return

    def start() -> None:
        if auto.policy is not None:
            adapt(on, policy_of(auto.policy), auto.replan)

    def stop() -> None:  # what it has submitted still runs, on all ranks
        on.adaptation = None

    def spent() -> tuple[float, float]:
        totals = on.totals()
        return totals["backward_seconds"], totals["exposed_seconds"]

    of = on.owner, on.switch, named, on.remade, spent, start, stop, on.decided
    on.automatic = Automatic(auto, *of)


def refuse_update(adaptation: Adaptation | None) -> None:
    """Raise ConfigError for an update by the user where a policy makes them."""
    if adaptation is not None:
        raise ConfigError(
            f"update: the policy {adaptation.policy.name} changes this handle's plan: detach, and "
            "attach without one"
        )
