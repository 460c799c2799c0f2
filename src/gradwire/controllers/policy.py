"""The policy interface: which choice each layer gets, within a budget of error.

A policy is a frozen dataclass whose fields are its options. The contract is one method:

    @dataclass(frozen=True)
    class Cautious(Policy):
        def choose(self, layers, budget):
            return [int(one.errors.argmin()) for one in layers]

Policies are pure: equal tables give equal choices, on every rank and in every process. They do not
see steps or time. A policy that remembers, such as Accordion, gets its memory as an option.

`propose` keeps what must hold of every policy that is bounded: the error is never above the budget,
and the plan never costs more than the uniform one if that is within the budget. Where no plan is
possible, the proposal is the uniform plan, and its line says why.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from gradwire.aggregators import Aggregator
from gradwire.controllers import error
from gradwire.controllers.layer import (
    Budget,
    Layer,
    plan_cost,
    plan_error,
    plan_global_error,
    plan_nbytes,
)
from gradwire.errors import ConfigError


@dataclass(frozen=True)
class Proposal:
    """A plan that a policy proposes.

    Attributes:
        policy: its name.
        choices: per layer, the index of its method.
        methods: by the layers' labels.
        nbytes, reference_nbytes: payload bytes per rank and step, and those of the uniform plan.
        error: in units of the budget's metric.
        global_error: the L2 norm of all layers' errors as one vector.
        budget: as given; Accordion's proposals may exceed it.
        seconds: that choosing took.
        fallback: why it is the uniform plan instead of the policy's choice; "" if it is not.
        line: for a log: all this as one line.
    """

    policy: str
    choices: tuple[int, ...]
    methods: Mapping[str, Aggregator]
    nbytes: int
    reference_nbytes: int
    error: float
    global_error: float
    budget: Budget
    seconds: float
    fallback: str
    line: str


@dataclass(frozen=True)
class Policy:
    """How choices are made.

    Args:
        budget: the uniform plan, as `gw.attach` takes a codec: "qsgd:bits=4". What it errs is what
            plans may err. None: the codec that `attach` is given.

    Attributes:
        name: in the registry, in rows and in log lines.
        bounded: whether proposals keep to the budget.
    """

    budget: str | None = field(default=None, kw_only=True)

    name: ClassVar[str]
    bounded: ClassVar[bool] = True

    def choose(self, layers: Sequence[Layer], budget: Budget) -> Sequence[int] | None:
        """A choice per layer, by index; None: there is none within the budget.

        Args:
            layers: with finite tables, at least one.
            budget: not below the least possible error, if the policy is bounded.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no choose")

    def after(self, layers: Sequence[Layer]) -> Policy:
        """The policy of the next decision, which remembers these layers."""
        return self

    def memory(self) -> dict[str, Any]:
        """What it remembers, as JSON has it."""
        return {}

    def remembering(self, memory: Mapping[str, Any]) -> Policy:
        """The policy with what `memory` gave.

        Raises:
            TypeError, ValueError, KeyError: it is something else.
        """
        return self

    def propose(self, layers: Sequence[Layer], budget: Budget) -> Proposal:
        """A plan for these layers, never above the budget if the policy is bounded and any is.

        Raises:
            ConfigError: there are no layers, or two have the same label.
        """
        _check(layers)
        begun = time.perf_counter()
        uniform = tuple(one.reference for one in layers)
        reason = _no_plan(layers, budget, self.bounded)
        chosen: tuple[int, ...] = uniform
        if not reason:
            given = [_read_only(_without_gradient(one)) for one in layers]
            found = self.choose(given, budget)
            chosen, reason = self._checked(layers, budget, uniform, found)
        return _proposal(self.name, layers, budget, chosen, time.perf_counter() - begun, reason)

    def _checked(
        self,
        layers: Sequence[Layer],
        budget: Budget,
        uniform: tuple[int, ...],
        found: Sequence[int] | None,
    ) -> tuple[tuple[int, ...], str]:
        """The choices found, or the uniform plan with the reason."""
        if found is None:
            return uniform, "found no plan within the budget"
        chosen = self._indices(layers, found)
        if not self.bounded:
            return chosen, ""
        above = plan_error(layers, chosen, budget.metric) > budget.error
        assert not above, f"{self.name} exceeds its budget"
        within = plan_error(layers, uniform, budget.metric) <= budget.error
        if within and plan_cost(layers, uniform) < plan_cost(layers, chosen):
            return uniform, "found no plan that costs less"
        return chosen, ""

    def _indices(self, layers: Sequence[Layer], found: Sequence[int]) -> tuple[int, ...]:
        """The choices found, as ints; raises ConfigError if they are none of these layers."""
        try:
            chosen = tuple(operator.index(c) for c in found)
        except TypeError:
            raise ConfigError(
                f"policy {self.name}: choose gave {found!r:.60}: give the index of a method per "
                "layer, or None"
            ) from None
        if len(chosen) != len(layers):
            raise ConfigError(
                f"policy {self.name}: choose gave {len(chosen)} choices for {len(layers)} layers: "
                "give one per layer"
            )
        for one, c in zip(layers, chosen, strict=True):
            if not 0 <= c < len(one.methods):
                raise ConfigError(
                    f"policy {self.name}: choose gave layer {one.label} the choice {c}: give 0 to "
                    f"{len(one.methods) - 1}"
                )
        return chosen


@dataclass(frozen=True)
class Uniform(Policy):
    """The reference for every layer, whatever the budget: what adaptive policies are measured
    against (CGX 4.1)."""

    name = "uniform"
    bounded = False

    def choose(self, layers: Sequence[Layer], budget: Budget) -> Sequence[int]:
        return [one.reference for one in layers]


def _check(layers: Sequence[Layer]) -> None:
    if not layers:
        raise ConfigError("a policy needs at least one layer")
    labels = [one.label for one in layers]
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ConfigError(f"two layers are {twice}: give each parameter once")


def _no_plan(layers: Sequence[Layer], budget: Budget, bounded: bool) -> str:
    """Why these tables have no plan within the budget; "" if they have."""
    for one in layers:
        if not np.isfinite(one.errors).all():
            return f"layer {one.label} has an error that is not finite"
        if (one.errors < 0).any() or (one.nbytes < 0).any():
            return f"layer {one.label} has a negative error or size"
    if not bounded:
        return ""
    if not math.isfinite(budget.error):
        return f"the budget is {budget.error}"
    least = error.total(float(error.terms(one.errors, budget.metric).min()) for one in layers)
    if least > budget.error:
        return f"no plan is within {budget.error:.4g}: the least error is {least:.4g}"
    return ""


def _without_gradient(one: Layer) -> Layer:
    """A layer whose choices all look free, since its gradient is zero, keeps its reference."""
    if one.errors.any():
        return one
    at = one.reference
    errors = np.full(len(one.errors), np.inf)
    errors[at] = 0.0
    return replace(one, errors=errors)


def _read_only(one: Layer) -> Layer:
    """Rulings, and what a policy remembers, are of tables as they were measured."""
    nbytes, errors = one.nbytes.view(), one.errors.view()
    nbytes.flags.writeable = errors.flags.writeable = False
    return replace(one, nbytes=nbytes, errors=errors)


def _proposal(
    policy: str,
    layers: Sequence[Layer],
    budget: Budget,
    chosen: tuple[int, ...],
    seconds: float,
    fallback: str,
) -> Proposal:
    nbytes = plan_nbytes(layers, chosen)
    uniform = plan_nbytes(layers, [one.reference for one in layers])
    found = plan_error(layers, chosen, budget.metric)
    times = f"{uniform / nbytes if nbytes else 1.0:.3f} times fewer"
    if nbytes > uniform > 0:
        times = f"{nbytes / uniform:.3f} times more"
    still = sum(not one.errors.any() for one in layers if len(one.methods) > 1)
    parts = [
        f"{policy}: {nbytes} bytes per step, {times} than uniform",
        f"error {found:.4g} of {budget.error:.4g} ({budget.metric})",
        f"{seconds:.3f} s",
    ]
    if fallback:
        parts[0] = f"{policy}: the uniform plan, {nbytes} bytes per step: {fallback}"
    if still:
        parts.append(f"{still} without a gradient as in the uniform plan")
    methods = {one.label: one.methods[c] for one, c in zip(layers, chosen, strict=True)}
    return Proposal(
        policy, chosen, methods, nbytes, uniform, found,
        plan_global_error(layers, chosen), budget, seconds, fallback, ", ".join(parts),
    )  # fmt: skip
