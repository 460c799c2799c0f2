"""What a policy chooses at a module: methods of its parameters, from a family around theirs.

A *target* is what of the parameters is chosen: how their gradients are averaged, or the codecs in
which FSDP2 gathers their weights. Each has a uniform plan and a budget of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gradwire.aggregators import Aggregator, Compressed, Dense, PowerSGD
from gradwire.aggregators import registry as aggregators
from gradwire.codecs import QSGD, RandomShift, TopK
from gradwire.controllers import Policy, registry
from gradwire.controllers.families import (
    Bits,
    CodecBits,
    Density,
    Family,
    Feedback,
    Mixture,
    Rank,
)
from gradwire.controllers.replan import Replan
from gradwire.errors import ConfigError
from gradwire.planner import Plan, Rules
from gradwire.planner.plan import ParameterPlan, meaning
from gradwire.planner.rules import exactly

log = logging.getLogger("gradwire")

GRADIENTS, WEIGHTS = "gradients", "weights"
Methods = Mapping[str, Mapping[str, Aggregator]]  # by target and parameter


@dataclass(frozen=True)
class Target:
    """Parameters whose methods a policy chooses.

    Attributes:
        kind: "gradients", or "weights", whose method is their codec alone.
        shapes: of the parameters, by name, in the plan's order.
        reference: the method of all of them in the uniform plan.
        family: the choices around it.
    """

    kind: str
    shapes: Mapping[str, tuple[int, ...]]
    reference: Aggregator
    family: Family

    def methods(self, plan: Plan) -> dict[str, Aggregator]:
        """Those that a plan gives these parameters."""
        of = [p for p in plan.parameters if p.name in self.shapes]
        if self.kind == GRADIENTS:
            return {p.name: p.inner for p in of}
        return {p.name: Compressed(p.weight) for p in of if p.weight is not None}

    def chosen(self, choices: Mapping[str, int]) -> dict[str, Aggregator]:
        """The methods that these are the indices of."""
        return {n: self.family.methods(self.shapes[n])[choice] for n, choice in choices.items()}

    def named(self, texts: Mapping[str, str]) -> dict[str, Aggregator]:
        """The methods of all parameters, of which some have others than the reference: by the text
        that a state has of them. They round as those of the family do.

        Raises:
            ValueError, KeyError: there is no such choice, or no such parameter.
        """
        found = dict.fromkeys(self.shapes, self.reference)
        for name, text in texts.items():
            choices = {meaning(m.recorded()): m for m in self.family.methods(self.shapes[name])}
            whole = text if ":rank=" in text else text.replace("powersgd", "powersgd:rank=2")
            method = aggregators.get(whole)  # older states leave the rank out that was the default
            if meaning(method.recorded()) not in choices:
                raise ValueError(f"{name} has {method}")
            found[name] = choices[meaning(method.recorded())]
        return found


def targets_of(plan: Plan, mixed: bool = False) -> dict[str, Target]:
    """Of a plan as `attach` made it, by kind: parameters of two dimensions and more whose
    gradients, or whose weights, are compressed.

    Args:
        mixed: whether gradients have the choices of all families.

    Raises:
        ConfigError: there are none; or gradients have several methods, or one without a family; or
            their choices are mixed without error feedback.
    """
    found = {}
    left: ConfigError | None = None  # why weights stay as they are
    for kind in (GRADIENTS, WEIGHTS):
        methods = {p.name: m for p in plan.parameters if (m := _method(p, kind)) is not None}
        shapes = {p.name: p.shape for p in plan.parameters if len(p.shape) > 1}
        shapes = {name: shape for name, shape in shapes.items() if name in methods}
        if not shapes:
            continue
        references = {methods[name] for name in shapes}
        try:
            if kind == WEIGHTS and plan.weights is not None and plan.weights.keep == "reference":
                raise ConfigError(
                    'policy: with keep="reference" differences of weights are sent, whose errors '
                    "no table has"
                )
            family = family_of(references) if kind == GRADIENTS else weights_family(references)
            if mixed and kind == GRADIENTS:
                family = _mixture(family, [p for p in plan.parameters if p.name in shapes])
            if kind == GRADIENTS and any(p.feedback for p in plan.parameters if p.name in shapes):
                family = Feedback(family)
        except ConfigError as error:
            if kind == GRADIENTS:
                raise
            log.info("%s: weights are gathered as attach was told", error)
            left = error
            continue
        found[kind] = Target(kind, shapes, next(iter(references)), family)
    if not found:
        raise left or ConfigError("policy: nothing is compressed that it could choose a method of")
    return found


def with_methods(plan: Plan, methods: Methods) -> tuple[Plan, Rules]:
    """(the plan, its rules) with other methods of some parameters, to be made anew."""
    of = {
        kind: {exactly(name): method for name, method in methods.get(kind, {}).items()}
        for kind in (GRADIENTS, WEIGHTS)
    }
    if of[WEIGHTS]:
        assert plan.weights is not None
        codecs = {n: m.codec for n, m in of[WEIGHTS].items() if isinstance(m, Compressed)}
        plan = replace(plan, weights=plan.weights.changed(codecs))
    return plan, plan.rules.changed(codecs=of[GRADIENTS])


def family_of(references: set[Aggregator]) -> Family:
    """The choices around a uniform plan's method.

    Raises:
        ConfigError: there are several methods, or one that has no family.
    """
    reference = _single(references)
    family: Family | None = None
    codec = reference.codec if isinstance(reference, Compressed) else None
    if isinstance(codec, QSGD):
        family = Bits(bits=codec.bits, block=codec.block)
    elif isinstance(codec, TopK):
        family = Density(density=codec.density)
    elif isinstance(reference, PowerSGD):
        family = Rank(rank=reference.rank)
    if family is None or family.reference((1 << 20, 1 << 20)) != reference:
        raise ConfigError(
            f"policy: no choices around {reference}: attach with qsgd (bits, block), topk "
            "(density) or powersgd (rank), other options at their defaults"
        )
    return family


def _mixture(family: Family, parameters: Sequence[ParameterPlan]) -> Family:
    """With the choices of the other families, which lose so much of a single gradient that they
    need error feedback."""
    without = next((p.name for p in parameters if not p.feedback), None)
    if without is not None:
        raise ConfigError(
            f"policy: {without} has no error feedback, which mixed choices need: attach with "
            "error_feedback=True"
        )
    others = (one for one in (Bits(), Density(), Rank()) if type(one) is not type(family))
    return Mixture((family, *others))


def weights_family(references: set[Aggregator]) -> Family:
    """The choices around the codec in which weights are gathered.

    Raises:
        ConfigError: there are several, or it is neither randomshift nor qsgd.
    """
    reference = _single(references)
    codec = reference.codec if isinstance(reference, Compressed) else None
    if not isinstance(codec, RandomShift | QSGD):
        raise ConfigError(f"policy: no choices of bits around {reference}")
    return CodecBits(codec)


def _single(references: set[Aggregator]) -> Aggregator:
    if len(references) != 1:
        raise ConfigError(
            "policy: parameters have several methods, "
            + ", ".join(sorted(map(str, references)))
            + ": a policy starts from one, and leaves alone what is sent uncompressed"
        )
    return next(iter(references))


def _method(p: ParameterPlan, kind: str) -> Aggregator | None:
    """A parameter's method; None: it is sent uncompressed."""
    if kind == WEIGHTS:
        return None if p.weight is None else Compressed(p.weight)
    return None if isinstance(p.inner, Dense) else p.inner


def policy_of(given: object) -> Policy:
    """The policy that a user means.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(given, str):
        return registry.get(given)
    if isinstance(given, Policy):
        name = getattr(given, "name", None)
        if not (isinstance(name, str) and name):
            raise ConfigError(
                f"policy={given!r:.60}: its class has no name, by which rows and lines call it: "
                f'write name = "{type(given).__name__.lower()}" in it'
            )
        return given
    raise ConfigError(
        f"policy={given!r:.60}: give a policy, or the name of one: {', '.join(registry.REGISTRY)}"
    )


def decides_of(given: object) -> tuple[Policy, Replan]:
    """The policy that a user means, and when it decides.

    Raises:
        ConfigError: it is none.
    """
    replan = given if isinstance(given, Replan) else Replan()
    return policy_of(replan.policy if isinstance(given, Replan) else given), replan
