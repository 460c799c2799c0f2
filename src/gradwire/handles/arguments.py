"""The arguments of `attach` by subject, each with its checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule

from gradwire.aggregators import Aggregator, registry
from gradwire.aggregators.registry import Method
from gradwire.errors import ConfigError
from gradwire.lang import Codec
from gradwire.planner import Plan, Rules, WeightRules
from gradwire.planner.files import PlanFile
from gradwire.planner.weights import Weights, all_in_blocks

if TYPE_CHECKING:  # loaded on use: most handles have no policy
    from gradwire.controllers import Policy
    from gradwire.controllers.replan import Replan
    from gradwire.controllers.targets import Target
    from gradwire.decide.auto import Auto
    from gradwire.handles.reductions import Reductions


# Arguments that there were -> what to write.
RENAMED = {
    "algorithm": 'options=gw.Options(algorithm="ring")',
    "seed": "options=gw.Options(seed=1)",
    "coalesce_bytes": "options=gw.Options(coalesce_bytes=0)",
    "keep": 'options=gw.Options(keep="reference")',
    "replan": 'policy=gw.Replan("lgreco", every=500)',
    "auto": "gw.attach(model, gw.Auto())",
}


def check_renamed(call: str, keywords: Iterable[str]) -> None:
    """Raise ConfigError for a keyword that a call has no longer."""
    for name in RENAMED.keys() & set(keywords):
        write = RENAMED[name]
        if call == "update":  # the other options stay
            write = write.replace("gw.Options(", "dataclasses.replace(handle.plan.options, ")
        raise ConfigError(f"{call}: {name} is given otherwise now: write {write}")


@dataclass(frozen=True)
class Methods:
    """How gradients are averaged.

    Attributes:
        options: of the codec, as further keywords.
        codec, include, exclude, codecs, error_feedback: see `attach`.
    """

    codec: Method | Auto = "qsgd"
    options: Mapping[str, object] | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    codecs: Mapping[str, Method] | None = None
    error_feedback: bool = False

    def pinned(self, plan: PlanFile) -> Methods:
        """Those of a plan's file, which says how each parameter is sent."""
        if self.options or replace(self, options=None) != Methods():
            raise ConfigError(_PINNED)
        return Methods(None, {}, codecs=plan.by_name())

    def rules(self, sharded: bool = False) -> Rules:
        """Raises ConfigError for what makes no rules.

        Args:
            sharded: of FSDP2, whose codecs have larger blocks by default.
        """
        given: dict[str, Any] = {**vars(self)}
        options = given.pop("options") or {}
        if sharded:
            given = all_in_blocks(given, options)
        return Rules().changed(options, **given)


_PINNED = (
    "attach: a plan says how each parameter is sent: leave codec and its options, include, "
    "exclude, codecs, error_feedback and weights out"
)


def read_plan(given: object, gathered: WeightsGiven) -> PlanFile:
    """The file that `plan` names.

    Raises:
        ConfigError: there is none, or other arguments say how parameters are sent, too.
    """
    if given == "measured":
        raise ConfigError(
            'attach: plan="measured": plan before training, by `torchrun --nproc-per-node N -m '
            "gradwire plan --shapes FILE --save PLAN` on the network as it is, or `gradwire plan "
            "--shapes FILE --net RATE,LATENCY --save PLAN` on a given one, and give plan=PLAN "
            "(handle.plan.save writes FILE)"
        )
    if gathered.by is not None:
        raise ConfigError(_PINNED)
    if isinstance(given, PlanFile):
        return given
    if not given or not isinstance(given, str | os.PathLike):
        raise ConfigError(
            f"attach: plan={given!r:.60}: give the path of a file that handle.plan.save or "
            "`gradwire plan --save` wrote"
        )
    return PlanFile.read(given)


@dataclass(frozen=True)
class WeightsGiven:
    """How FSDP2's weights are gathered.

    Attributes:
        by, keep: `weights` and `keep` of `attach`.
    """

    by: Weights
    keep: str | None

    def rules(self) -> WeightRules | None:
        """None: as FSDP2 does; raises ConfigError for what makes no rules."""
        rules = WeightRules.of(self.by, self.keep)
        if self.by is None and self.keep is not None:
            raise ConfigError(
                f"attach: keep={self.keep!r} is for weights in a codec: give weights, too, such as "
                '"randomshift:bits=8"'
            )
        return None if self.by is None else rules

    def refuse(self) -> None:
        """Raise ConfigError if there is anything: of DDP."""
        if self.by is not None or self.keep is not None:
            raise ConfigError(
                "attach: weights and keep are for FSDP2 modules, which gather weights; DDP sends "
                "gradients alone: leave these arguments out"
            )


@dataclass(frozen=True)
class Decides:
    """What changes the plan while training runs: a policy with its times, or automatic mode."""

    policy: Policy | None = None
    replan: Replan | None = None
    auto: Auto | None = None

    @classmethod
    def of(cls, policy: object, methods: Methods, model: object) -> tuple[Decides, Methods]:
        """Also the methods to begin with."""
        named = isinstance(methods.codec, str | Codec | Aggregator | None)
        if policy is None and named and methods.codec != "auto":
            return cls(), methods
        from gradwire.controllers.targets import decides_of
        from gradwire.decide.auto import Auto

        if methods.codec == "auto" or isinstance(methods.codec, Auto):
            _check_automatic(model, methods, policy)
            auto = methods.codec if isinstance(methods.codec, Auto) else Auto()
            return cls(auto=auto), replace(methods, codec="bf16")
        if policy is None:
            return cls(), methods
        found, replan = decides_of(policy)
        if found.budget is not None:
            if methods.options or methods.codec not in ("qsgd", found.budget):
                raise ConfigError(
                    f"attach: codec={methods.codec!r:.60}: the policy's budget is "
                    f"{found.budget!r}, and is the codec: leave codec and its options out, or the "
                    "budget"
                )
            methods = replace(methods, codec=found.budget)
        if isinstance(model, FSDPModule) and replan.mixed:
            raise ConfigError("policy: Replan(mixed=True) is for DDP: FSDP2 has no PowerSGD")
        if isinstance(model, FSDPModule) and replan.weigh != "bytes":
            raise ConfigError(
                f"policy: Replan(weigh={replan.weigh!r}) is for DDP, which has buckets"
            )
        return cls(found, replan), methods

    def describe(self) -> list[str]:
        """For agreement: as many lines on all ranks."""
        return [f"{name} {one!r}" for name, one in vars(self).items()]

    def check(self, plan: Plan, planned: Callable[[Rules], Plan]) -> None:
        """Raise ConfigError if what may be used from a plan on makes none.

        Args:
            planned: makes one.
        """
        self.targets(plan)
        for method in () if self.auto is None else self.auto.candidates:
            planned(self.auto.rules(plan.rules, method))  # type: ignore[union-attr]

    def targets(self, plan: Plan) -> list[Target]:
        """What a policy chooses methods of; raises ConfigError if there is nothing."""
        if self.replan is None:
            return []
        from gradwire.controllers.targets import targets_of

        return list(targets_of(plan, self.replan.mixed).values())

    def encoders(self, plan: Plan) -> Iterator[Codec]:
        """The codecs that a handle may use which begins with a plan."""
        yield from plan.encoders
        for target in self.targets(plan):
            for method in target.family.methods(next(iter(target.shapes.values()))):
                yield from method.encoders
        if self.auto is not None:
            yield from self.auto.known_codecs
            for text in self.auto.methods:
                yield from registry.get(text).encoders

    def start(self, on: Reductions) -> None:
        """Decide from now on."""
        if self.policy is not None and self.replan is not None:
            on.adapt(self.policy, self.replan)
        if self.auto is not None:
            on.automate(self.auto)


def _check_automatic(model: object, methods: Methods, policy: object) -> None:
    """Raise ConfigError for what does not go with "auto"."""
    if isinstance(model, FSDPModule):
        raise ConfigError(
            'attach: "auto" is for DDP modules; give an FSDP2 module a codec: write '
            'gw.attach(model, "qsgd:bits=4"); `gradwire doctor --ranks 2` says whether compression '
            "pays on this network, and `gradwire sim --sharded` predicts a step"
        )
    feedback = {"error_feedback": methods.error_feedback or None}
    given = {"policy": policy, **(methods.options or {}), **feedback}
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f'attach: {name}={value!r:.60}: "auto" decides this; gw.Auto says between what'
            )
