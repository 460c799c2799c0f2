"""A versioned plan: how each parameter of a module is averaged, and how its collectives run.

Codecs, and all aggregators but `Dense`, take fp32, fp16 and bf16. A parameter of another dtype
(float64, complex) is averaged uncompressed; it is an error if rule 1 or 3 asks to compress it.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from gradwire.aggregators import Aggregator, Dense, Encoded, ErrorFeedback
from gradwire.collectives import Options, check_defined, check_feedback
from gradwire.collectives.legal import FLOATS
from gradwire.errors import ConfigError
from gradwire.lang import Codec
from gradwire.partition import rotation
from gradwire.planner.learned import Learned
from gradwire.planner.rules import Rules
from gradwire.planner.weights import WeightRules


@dataclass(frozen=True)
class ParameterPlan:
    """How one parameter is averaged.

    Attributes:
        name, shape, dtype: of the parameter.
        aggregator: computes its average; equal aggregators of a plan are one object.
        rotation: see gradwire.partition.
        weight: the codec in which FSDP2 gathers the parameter; None: uncompressed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    aggregator: Aggregator
    rotation: int
    weight: Codec | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def feedback(self) -> bool:
        """Whether error feedback keeps a residual."""
        return isinstance(self.aggregator, ErrorFeedback) or self.aggregator.own_feedback

    @property
    def inner(self) -> Aggregator:
        """The aggregator without error feedback."""
        return (
            self.aggregator.inner if isinstance(self.aggregator, ErrorFeedback) else self.aggregator
        )

    @property
    def codec(self) -> Codec | None:
        """The codec, if the aggregator does nothing but encode the gradient with one; else None."""
        return self.inner.codec if isinstance(self.inner, Encoded) else None

    @property
    def how(self) -> str:
        """The codec or aggregator as states name it, or "dense"; without error feedback."""
        return self.inner.recorded()

    def __str__(self) -> str:
        gathered = "" if self.weight is None else f", weights in {self.weight}"
        return f"{self.name}: {self.numel} x {self.dtype}, {self.aggregator}{gathered}"

    def facts(self) -> dict[str, str | int | bool]:
        """What a saved state must share with the plan that loads it."""
        return {
            "numel": self.numel,
            "dtype": str(self.dtype),
            "codec": self.how,
            "feedback": self.feedback,
        }


# Options of codecs that say how a value is rounded and in what a grid's numbers are stored.
_ROUNDS = r"\b(?:rounding|metadata)='\w*'(?:, )?"


def meaning(how: str) -> str:
    """A method's text without the options that change nothing in what it keeps between steps: a
    residual is what was not sent, however that was rounded."""
    return re.sub(_ROUNDS, "", how).replace(", )", ")")


@dataclass(frozen=True)
class Plan:
    """How a module is synchronised.

    Attributes:
        version: 0 at attach; each update adds 1.
        rules: the rules from which the plan was made.
        options: of every collective.
        coalesce_bytes: DDP's buckets are combined until they hold at least as many bytes.
        parameters: every parameter's plan, in the module's order.
        weights: the rules by which FSDP2's weights are gathered; None: that is left to FSDP2.
        levels: learned ones, of "learnedlevels" codecs.
    """

    version: int
    rules: Rules
    options: Options
    coalesce_bytes: int
    parameters: tuple[ParameterPlan, ...]
    weights: WeightRules | None = None
    levels: Learned = field(default_factory=Learned)

    __signature__ = inspect.Signature()  # attach makes it

    @property
    def encoders(self) -> list[Codec]:
        """The codecs of gradients whose kernels take most of a method's time, and of weights."""
        found = [codec for p in self.parameters for codec in p.aggregator.encoders]
        return found + [p.weight for p in self.parameters if p.weight is not None]

    def describe(self) -> list[str]:
        """The lines that ranks compare: one for the plan, and one per parameter."""
        kept = "" if self.weights is None else f", keep={self.weights.keep}"
        return [
            f"version {self.version}, buckets of {self.coalesce_bytes} bytes, {self.options}{kept}",
            *map(str, self.parameters),
            *self.levels.lines(),
        ]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, for `gw.attach(model, plan=path)` and `gradwire plan diff`;
        learned levels are left out.

        Raises:
            ConfigError: a codec or an aggregator is not one of those that have names.
            OSError: the file cannot be written.
        """
        from gradwire.planner.files import PlanFile  # which imports this file

        PlanFile.of(self).save(path)

    def at(self, steps: Mapping[str, int]) -> Plan:
        """The plan as it is in these steps, by parameter: see `Aggregator.at`."""
        parameters = [
            replace(p, aggregator=p.aggregator.at(steps[p.name])) for p in self.parameters
        ]
        return replace(self, parameters=tuple(parameters))


def make_plan(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    rules: Rules,
    world_size: int,
    options: Options | None = None,
    coalesce_bytes: int = 0,
    version: int = 0,
) -> Plan:
    """Apply the rules to the parameters that are synchronised.

    Args:
        named_parameters: a tied parameter comes once per name. The plan uses the first.

    Raises:
        ConfigError: a pattern matches nothing, a rule asks for a codec for an unsupported dtype, a
            codec is not defined in the algorithm or with error feedback, there is no parameter, or
            an aggregator cannot compress a parameter that `codecs` gives it, or any parameter.
    """
    options = options or Options()
    names: dict[torch.Tensor, list[str]] = {}
    for name, parameter in named_parameters:
        names.setdefault(parameter, []).append(name)
    if not names:
        raise ConfigError(
            "the module has no parameter that requires a gradient: nothing to attach to"
        )
    rules.check(tuple(known) for known in names.values())
    unique: dict[Aggregator, Aggregator] = {}  # equal aggregators share one object and its rounds
    planned = []
    refusals: dict[Aggregator, list[str | None]] = {}  # of matrices, by the default aggregator
    for number, (parameter, known) in enumerate(names.items()):
        chosen, rule = rules.choose(tuple(known), parameter.shape)
        if parameter.dtype not in FLOATS and chosen != Dense():
            if rule:
                raise _no_codec(rule, known[0], parameter)
            chosen = Dense()
        refusal = chosen.impossible(tuple(parameter.shape))
        if rule.startswith("codecs") and refusal is not None:
            raise ConfigError(f"{rule}: parameter {known[0]}: {refusal}")
        if parameter.dim() > 1 and chosen != Dense():
            what = None if refusal is None else f"parameter {known[0]}: {refusal}"
            refusals.setdefault(chosen, []).append(what)
        chosen = rules.available(chosen, parameter.dtype)
        wrapped = chosen != Dense() and (rules.feedback or chosen.needs_feedback)
        # A single rank sends nothing, so there is no error to keep.
        has = isinstance(chosen, ErrorFeedback) or chosen.own_feedback
        if wrapped and world_size > 1 and not has:
            chosen = ErrorFeedback(chosen)
        chosen = unique.setdefault(chosen, chosen)
        turn, shape = rotation(number, world_size), tuple(parameter.shape)
        planned.append(ParameterPlan(known[0], shape, parameter.dtype, chosen, turn))
    for found in refusals.values():
        if all(found):
            raise ConfigError(f"no parameter can be compressed; {found[0]}")
    for one in {p.aggregator: p for p in planned}.values():
        one.inner.check_ranks(world_size)
        if isinstance(one.inner, Encoded):
            check_defined(one.inner.algorithm or options.algorithm, one.inner.codec)
            if one.feedback:
                check_feedback(one.inner.codec)
    return Plan(version, rules, options, coalesce_bytes, tuple(planned))


def _no_codec(rule: str, name: str, parameter: torch.Tensor) -> ConfigError:
    remedy = f"exclude it: exclude=[{name!r}]"
    if rule.startswith("codecs"):
        remedy = f"map it to None before that pattern: codecs={{{name!r}: None, ...}}"
    return ConfigError(
        f"{rule} asks to compress parameter {name} of dtype {parameter.dtype}: codecs take "
        f"float32, float16 and bfloat16; other dtypes are averaged uncompressed; {remedy}"
    )
