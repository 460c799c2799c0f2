"""Accordion: two levels, by whether a layer is in a critical regime (THESIS 4.6.3; Agarwal et al.
2021), alone and as the default plan of LGreco.

A layer is critical if the norm of its accumulated gradient has changed by a share of `eta` or more
since the last decision, or if the learning rate has just been lowered, or at the first decision. A
critical layer gets the low level of compression, the others the high one.

The norms of the last decision are the policy's memory. It is an option, so that decisions stay pure
functions:

    proposal = accordion.propose(layers, budget)
    accordion = accordion.after(layers)

`memory` and `remembering` save and restore it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradwire.aggregators import Aggregator
from gradwire.controllers.layer import Budget, Layer
from gradwire.controllers.lgreco import LGreco
from gradwire.controllers.policy import Policy
from gradwire.errors import ConfigError


def critical(
    before: Mapping[str, float], now: Mapping[str, float], eta: float = 0.5, decayed: bool = False
) -> set[str]:
    """The layers in a critical regime.

    Args:
        before, now: norms of the accumulated gradients, by layer; see `Layer.label`.
        eta: the share of change from which a layer is critical.
        decayed: whether the learning rate was lowered in between.
    """
    if decayed:
        return set(now)
    found = set()
    for label, norm in now.items():
        last = before.get(label)
        # not "<": of norms that are not finite or zero nothing is known
        if last is None or not abs(norm - last) < eta * last:
            found.add(label)
    return found


@dataclass(frozen=True)
class Accordion(Policy):
    """The low or the high level of compression for each layer; the budget is not used.

    A layer that lacks a level among its choices, such as a bias, keeps its reference.

    Args:
        low, high: methods of critical layers, and of others. None: the reference, and the choice
            whose payload is nearest to `share` of the reference's.
        eta: see above.
        share: of `high`, where that is not given.
        before: norms at the last decision, by layer; empty at first.
        decayed: whether the learning rate was lowered since.

    Raises:
        ConfigError: low or high is no Aggregator, eta is not a number above 0, or share not one
            between 0 and 1.
    """

    low: Aggregator | None = None
    high: Aggregator | None = None
    eta: float = 0.5
    share: float = 0.5
    before: Mapping[str, float] = field(default_factory=dict)
    decayed: bool = False

    name = "accordion"
    bounded = False

    def __post_init__(self) -> None:
        for option in ("low", "high"):
            level = getattr(self, option)
            if not (level is None or isinstance(level, Aggregator)):
                raise ConfigError(
                    f"Accordion: {option}={level!r:.60}: give an Aggregator, such as "
                    "gradwire.aggregators.Compressed(gw.QSGD(bits=8))"
                )
        if not (isinstance(self.eta, float | int) and 0 < self.eta < math.inf):
            raise ConfigError(f"Accordion: eta={self.eta!r}: give a number above 0")
        if not (isinstance(self.share, float) and 0 < self.share < 1):
            raise ConfigError(f"Accordion: share={self.share!r}: give a number between 0 and 1")

    def after(self, layers: Sequence[Layer], decayed: bool = False) -> Accordion:
        """The policy of the next decision."""
        norms = {one.label: one.norm for one in layers}
        return replace(self, before=norms, decayed=decayed)

    def memory(self) -> dict[str, Any]:
        return {"norms": dict(self.before)}

    def remembering(self, memory: Mapping[str, Any]) -> Accordion:
        norms = {str(label): float(norm) for label, norm in memory.get("norms", {}).items()}
        return replace(self, before=norms)

    def choose(self, layers: Sequence[Layer], budget: Budget) -> Sequence[int]:
        norms = {one.label: one.norm for one in layers}
        inside = critical(self.before, norms, self.eta, self.decayed)
        return [self._low(one) if one.label in inside else self._high(one) for one in layers]

    def _low(self, one: Layer) -> int:
        return one.reference if self.low is None else _index(one, self.low)

    def _high(self, one: Layer) -> int:
        if self.high is not None:
            return _index(one, self.high)
        aim = self.share * float(one.nbytes[one.reference])
        near = min(range(len(one.methods)), key=lambda i: (abs(int(one.nbytes[i]) - aim), i))
        return _index(one, one.methods[near])


@dataclass(frozen=True)
class AccordionLGreco(Policy):
    """LGreco within the error of Accordion's plan, which takes the place of the uniform one.

    The budget's metric is used, its error is not.

    Args:
        accordion: decides on the default plan, and remembers.
        lgreco: finds one that costs less at the same error.
    """

    accordion: Accordion = field(default_factory=Accordion)
    lgreco: LGreco = field(default_factory=LGreco)

    name = "accordion-lgreco"
    bounded = False

    def after(self, layers: Sequence[Layer], decayed: bool = False) -> AccordionLGreco:
        """The policy of the next decision."""
        return replace(self, accordion=self.accordion.after(layers, decayed))

    def memory(self) -> dict[str, Any]:
        return self.accordion.memory()

    def remembering(self, memory: Mapping[str, Any]) -> AccordionLGreco:
        return replace(self, accordion=self.accordion.remembering(memory))

    def choose(self, layers: Sequence[Layer], budget: Budget) -> Sequence[int]:
        default = self.accordion.choose(layers, budget)
        pairs = zip(layers, default, strict=True)
        given = [replace(one, reference=choice) for one, choice in pairs]
        own = Budget.of(given, metric=budget.metric)
        return self.lgreco.choose(given, own) or default


def _index(one: Layer, method: Aggregator) -> int:
    """The choice of this method; the reference if the layer lacks it, or has no gradient."""
    at = one.methods.index(method) if method in one.methods else one.reference
    return at if math.isfinite(one.errors[at]) else one.reference
