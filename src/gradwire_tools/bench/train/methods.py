"""The methods that `bench train` compares: ways for DDP to average gradients.

A method is named by an entry of `NAMED`, or spelt out as `CODEC:OPTION=VALUE:...`, with or without
`gradwire:` before it. CODEC may be an aggregator; the options are those of `gradwire.attach`, of
`gradwire.Options` and of the codec (`qsgd:bits=2:block=1024:coordinated=true`), and `least=N`: of
fewer than N values parameters are sent uncompressed. With a policy
(`qsgd:bits=4:policy=lgreco:every=100:first=50`), those of `gradwire.Replan` go with it, and the
policy's own with `policy.` before them (`qsgd:policy=accordion:policy.share=0.75`), as `share` is
an option of both. Two decide by what they measure: `auto`, with options of `gradwire.Auto`
(`auto:trial=4`), and `flexible`, density and collective of top-k, with those of `gradwire.Flexible`
and `gradwire.Triggers` (`flexible:steps=5:rest=200`). What these two measure before the first step,
and the steps that they throw away, count as training time; after a run is resumed, they begin anew.

Any method but torch's PowerSGD may say how large DDP's buckets are, in MiB (`bucket_mb=1`), and one
that sends by a codec or aggregator whether steps wait for their last averages
(`qsgd:bits=4:cross_barrier=true`: they do not, `gradwire.attach`).

Others are torch's PowerSGD hook, `torch-powersgd:rank=R`, and `truncate:ratio=R`, which sends only
the first 1/ratio of each bucket, uncompressed: a bound on what compressing could pay (CGX Fig. 1;
THESIS C.2, Fig. C.1), a codec of that ratio that takes no time. The rest arrives as zeros, so that
ranks agree and nothing diverges, but what is trained is not the model: its rows are marked
`timing_only`. Replicas that meet every so many steps are `outer:...` (`outer.py`). What each has
sent, `applied` counts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import codecs
from gradwire.aggregators import Aggregator, Compressed, registry
from gradwire.codecs.text import parse as parse_text
from gradwire.controllers.flexible import check_pymoo
from gradwire.controllers.targets import decides_of, family_of
from gradwire.errors import ConfigError, nearest, use_one_of
from gradwire.flexible.flexible import check_numbers
from gradwire.flexible.triggers import Triggers
from gradwire.lang import Codec
from gradwire.lang.kernels import uncompiled
from gradwire.planner import make_plan
from gradwire.planner.rules import Rules, exactly
from gradwire_tools.bench.tasks import Task
from gradwire_tools.bench.train import outer
from gradwire_tools.bench.train.applied import (
    Applied,
    Options,
    compiled,
    not_compiled,
    of_handle,
    torch_cast,
    torch_powersgd,
    truncate,
)

Shapes = Sequence[tuple[str, tuple[int, ...]]]

AUTO, FLEXIBLE = "auto", "flexible"
_FIRST = "artopk:density=0.01"  # of `flexible`, until it decides


def _names(of: type[Any]) -> tuple[str, ...]:
    return tuple(option.name for option in fields(of))


# Arguments of `attach`, beside those of `gradwire.Options`.
_OF_RULES = ("codec", "include", "exclude", "codecs", "error_feedback")
_OF_ATTACH = (*_OF_RULES, "least", "policy")
_OF_OPTIONS = tuple(name for name in _names(gradwire.Options) if name != "keep")  # of weights
_OF_REPLAN = tuple(name for name in _names(gradwire.Replan) if name != "policy")
_OF_POLICY = "policy."  # before an option of the policy's own
_OF_AUTO = _names(gradwire.Auto)
_OF_TRIGGERS = _names(Triggers)
OF_DDP = ("bucket_mb", "cross_barrier")  # what DDP does, whatever averages


@dataclass(frozen=True)
class Method:
    """A method by name."""

    name: str
    kind: str  # which function of `_APPLY` puts it on a model
    options: Options = field(default_factory=dict)  # what that function is given
    bucket_mb: float | None = None  # DDP's `bucket_cap_mb`; None for its default
    cross_barrier: bool = False  # whether a step leaves its last averages to the next forward
    timing_only: bool = False  # only shows what a step can cost: it does not train the model

    learned = False  # whether levels are learned in training

    def check(self, ranks: int = 1, shapes: Shapes = ()) -> None:
        """Whether `apply` can succeed, told before anything is launched.

        Args:
            ranks: on which `apply` is to succeed.
            shapes: (name, shape) of the model's parameters; none checks the name and options alone.

        Raises:
            ConfigError: gradwire does not know the codec, an option or the algorithm, this machine
                has no compiled kernels for the codec, or the method cannot average such parameters
                on so many ranks.
        """
        if self.kind == FLEXIBLE:
            check_pymoo()
            _flexible_options(self.options)
        if self.automatic:
            _auto_options(self.options)
        if self.meets:
            try:
                outer.settings(self.options)
            except ConfigError as error:
                raise ConfigError(f"method {self.name!r}: {error}") from error
        if self.kind != "gradwire" or self.automatic:
            return
        made, options = self._made()
        reason = uncompiled(made.encoders) if options.target == "auto" else None
        if reason is not None:
            raise not_compiled(f"method {self.name!r}", reason)
        if not shapes:
            return
        own, given, _ = _split(self.options)
        of_rules = {k: given[k] for k in _OF_RULES if k in given}
        blank = [
            (name, torch.empty(shape, dtype=torch.float32, device="meta")) for name, shape in shapes
        ]
        try:
            make_plan(blank, Rules().changed(own, **of_rules), ranks, options)
        except ConfigError as error:
            raise ConfigError(f"method {self.name!r} on {ranks} ranks: {error}") from error

    def how(self) -> tuple[Codec, gradwire.Options]:
        """Of a method of gradwire's, the codec and how its collectives run.

        Raises:
            ConfigError: as `check`, or it is an aggregator, which is more than one collective.
        """
        if self.automatic:
            raise ConfigError(f"method {self.name!r} has no codec of its own: use `bench train`")
        self._check_alone()
        aggregator, options = self._made()
        if "policy" in self.options:
            raise ConfigError(f"method {self.name!r}: a policy is for `bench train`")
        if not isinstance(aggregator, Compressed):
            raise ConfigError(
                f"method {self.name!r}: {aggregator} takes several collectives; `bench train` "
                "compares such methods"
            )
        return aggregator.codec, options

    def alone(self) -> Options:
        """Of a method of gradwire's, the codec and options, where there is no step of DDP.

        Raises:
            ConfigError: it says how DDP trains.
        """
        self._check_alone()
        return self.options

    def _check_alone(self) -> None:
        if self.cross_barrier or self.bucket_mb is not None:
            raise ConfigError(
                f"method {self.name!r}: options {' and '.join(OF_DDP)} are for `bench train`"
            )

    @property
    def automatic(self) -> bool:
        """Whether it decides itself what is sent."""
        return self.options.get("codec") == AUTO

    @property
    def meets(self) -> bool:
        """Whether ranks are replicas with weights of their own."""
        return self.kind == outer.OUTER

    @property
    def cycle(self) -> tuple[int, int]:
        """Steps after which what they send is repeated, and how many more until it is there."""
        how = outer.settings(self.options) if self.meets else None
        return (1, 0) if how is None else (how.every, how.delay)

    @property
    def watches(self) -> bool:
        """Whether it measures the network while it trains."""
        return self.automatic or self.kind == FLEXIBLE

    def optimizer(self, task: Task, model: nn.Module) -> torch.optim.Optimizer:
        """The task's; without momentum if averages include it, and plain SGD if replicas step by
        the sign of their averages, which Adam's would be, too."""
        if self.meets and outer.settings(self.options).rule == "sign":
            return torch.optim.SGD(model.parameters(), lr=1.0)
        ours = self.kind == "gradwire" and not self.automatic
        return task.optimizer(model, 0.0 if ours and self._made()[0].replaces_momentum else None)

    def _made(self) -> tuple[Aggregator, gradwire.Options]:
        try:
            own, given, options = _split(self.options)
            made = registry.get(str(self.options["codec"]), **own)
            if "policy" in given:
                decides_of(given["policy"])
                family_of({made})
            return made, gradwire.Options(**options)
        except ConfigError as error:
            raise ConfigError(f"method {self.name!r}: {error}{self._beside()}") from error

    def _beside(self) -> str:
        """What else could have been meant by an option that the codec does not have."""
        others = (*_OF_ATTACH, *_OF_OPTIONS, *(_OF_REPLAN if "policy" in self.options else ()))
        own = [name for name in self.options if name not in {*others, *registry.OPTIONS}]
        found = [repr(near) for name in own if (near := nearest(name, others))]
        return f" (did you mean {', '.join(found)}?)" if found else ""

    def distribute(self, model: nn.Module) -> Any:
        """The model under DDP, bucketed as the method needs it; or by itself."""
        if self.meets:
            return outer.Apart(model)
        return DistributedDataParallel(model, bucket_cap_mb=self.bucket_mb)

    def apply(self, model: Any, optimizer: torch.optim.Optimizer | None = None) -> Applied:
        """Registers the method's communication hook on `model`, once, before its first step.

        Args:
            optimizer: of the model; `flexible`, cross_barrier and replicas that meet need it.

        Raises:
            ConfigError: gradwire does not know the codec or an option.
        """
        begun = time.perf_counter()
        if self.kind != FLEXIBLE and not self.cross_barrier and not self.meets:
            applied = _APPLY[self.kind](model, self.options)
        elif optimizer is None:
            raise ConfigError(f"method {self.name!r} needs training: use `bench train`")
        elif self.meets:
            applied = outer.meet(model, optimizer, self.options)
        elif self.cross_barrier:
            applied = of_handle(attach(model, self.options, optimizer))
        else:
            applied = _flexible(model, optimizer, self.options)
        seconds = time.perf_counter() - begun
        return replace(applied, setup_seconds=seconds if self.watches else 0.0)


NAMED: dict[str, Method] = {
    method.name: method
    for method in (
        Method("torch-fp32", "torch_fp32", {"dtype": "fp32"}),
        Method("torch-fp16-hook", "torch_cast", {"dtype": "fp16"}),
        Method("torch-bf16-hook", "torch_cast", {"dtype": "bf16"}),
        # One bucket: the hook waits for collectives inside callbacks that run on gloo's own two
        # threads, so two buckets in flight wait for each other for ever (seen with torch 2.13).
        Method("torch-powersgd", "torch_powersgd", {"rank": 4}, bucket_mb=1 << 20),
        Method("gradwire-fp16", "gradwire", {"codec": "fp16"}),
        Method("gradwire-qsgd4", "gradwire", {"codec": "qsgd", "bits": 4}),
        Method("gradwire-terngrad", "gradwire", {"codec": "terngrad"}),
    )
}

# Methods without gradwire that take one number: its name, whether it is whole, and the method.
_NUMBERS: dict[str, tuple[str, bool, Method]] = {
    "torch-powersgd": ("rank", True, NAMED["torch-powersgd"]),
    "truncate": ("ratio", False, Method("truncate", "truncate", timing_only=True)),
}


def parse(text: str) -> Method:
    """The method that `text` names.

    Raises:
        ConfigError: no such name, or an option is not `name=value`; the message lists the known.
    """
    if text in NAMED:
        return NAMED[text]
    kind, _, rest = (part.strip() for part in text.partition(":"))
    ours = {**codecs.REGISTRY, **registry.REGISTRY}
    if kind == outer.OUTER:
        try:
            return Method(text, kind, outer.options_of(text))
        except ConfigError as error:
            raise ConfigError(f"method {text!r}: {error}") from error
    if kind in {*ours, AUTO, FLEXIBLE}:
        kind, rest = "gradwire", text
    if kind not in _NUMBERS and (not rest or kind not in {*NAMED, "gradwire"}):
        several = "CODEC:OPTION=VALUE:... with a codec or aggregator of `gradwire codec list`"
        known = [*NAMED, "truncate:ratio=R", AUTO, FLEXIBLE, "outer:PRESET:every=N", several]
        others = {name: name for name in ours}
        raise ConfigError(f"unknown method {text!r}: {use_one_of(kind, known, others)}")
    try:
        codec, options = parse_text(rest if kind == "gradwire" else text)
    except ConfigError as error:
        raise ConfigError(f"method {error}") from error
    of_ddp = {name: options.pop(name) for name in OF_DDP if name in options}
    return _under_ddp(_parsed(text, kind, codec, options), **of_ddp)


def _parsed(text: str, kind: str, codec: str, options: Options) -> Method:
    if kind in _NUMBERS:
        name, whole, base = _NUMBERS[kind]
        value = options.get(name)
        number = type(value) is int or (type(value) is float and not whole)
        if set(options) != {name} or not number or not 1 <= float(value or 0) < 1e9:
            what = "a whole number" if whole else "a number"
            raise ConfigError(f"method {text!r}: write {kind}:{name}=N, with {what} of 1 or more")
        return replace(base, name=text, options=options)
    if kind in NAMED:
        for name in options:
            raise ConfigError(f"method {kind} has no option {name!r}: {use_one_of(name, OF_DDP)}")
        return replace(NAMED[kind], name=text)
    if "codec" in options:
        raise ConfigError(f"method {text!r}: option 'codec' is given twice")
    if codec == FLEXIBLE:
        return Method(text, FLEXIBLE, options)
    return Method(text, "gradwire", {"codec": codec, **options})


def _under_ddp(method: Method, bucket_mb: Any = None, cross_barrier: Any = False) -> Method:
    """A method with options of `OF_DDP`; raises ConfigError where they have no meaning."""
    of = f"method {method.name!r}"
    if bucket_mb is not None:
        if method.bucket_mb is not None:
            raise ConfigError(f"{of}: torch's PowerSGD needs one bucket: leave bucket_mb out")
        if type(bucket_mb) not in (int, float) or not 0 < bucket_mb < 1e6:
            raise ConfigError(f"{of}: bucket_mb={bucket_mb}: give MiB, a number above 0")
        method = replace(method, bucket_mb=bucket_mb)
    if not isinstance(cross_barrier, bool):
        raise ConfigError(f"{of}: cross_barrier={cross_barrier}: use true or false")
    if cross_barrier and (method.kind != "gradwire" or method.automatic):
        raise ConfigError(
            f"{of}: cross_barrier is for methods of a codec or aggregator of gradwire's: "
            "torch's hooks end with backward, and auto and flexible time each step that they try"
        )
    return replace(method, cross_barrier=cross_barrier)


def knows(text: str) -> bool:
    """Whether `text` names a method, with valid options."""
    with contextlib.suppress(ConfigError):
        return bool(parse(text))
    return False


def attach(
    model: DistributedDataParallel, options: Options, crossing: torch.optim.Optimizer | None = None
) -> gradwire.Handle:
    """A handle, by the options of a method of gradwire's.

    Args:
        crossing: the optimizer whose steps do not wait for their last averages; None: all wait.

    Raises:
        ConfigError: gradwire does not know one of them.
    """
    if options["codec"] == AUTO:
        return compiled(gradwire.attach(model, _auto_options(options)))
    own, given, run = _split(options)
    least = given.pop("least", 0)
    if least:
        named = model.module.named_parameters()
        given["exclude"] = [exactly(name) for name, p in named if p.numel() < least]
    if crossing is not None:
        given |= {"optimizer": crossing, "cross_barrier": True}
    how = gradwire.Options(**run)
    return compiled(gradwire.attach(model, options=how, **given, **own))


def _split(options: Options) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(options of the codec, what else `attach` is given, what its `gradwire.Options` is made of);
    raises ConfigError for an option of `gradwire.Replan` with a wrong value."""
    own: dict[str, Any] = dict(options)
    run = {name: own.pop(name) for name in _OF_OPTIONS if name in own}
    given = {name: own.pop(name) for name in _OF_ATTACH if name in own}
    if "policy" in given:
        when = {name: own.pop(name) for name in _OF_REPLAN if name in own}
        if when.get("stale") == "none":
            when["stale"] = None
        of_policy = {n: own.pop(n) for n in list(own) if n.startswith(_OF_POLICY)}
        texts = [f"{n.removeprefix(_OF_POLICY)}={value}" for n, value in of_policy.items()]
        given["policy"] = gradwire.Replan(":".join([str(given["policy"]), *texts]), **when)
    return own, given, run


def _auto_options(options: Options) -> gradwire.Auto:
    """What automatic mode is told; raises ConfigError for another option, or a wrong value."""
    given: dict[str, Any] = {name: value for name, value in options.items() if name != "codec"}
    _check_known(AUTO, given, _OF_AUTO)
    for option in {"codecs", "methods"} & given.keys():
        given[option] = [str(given[option])]
    if given.get("policy") == "none":
        given["policy"] = None
    return gradwire.Auto(**given)


def _flexible_options(options: Options) -> dict[str, Any]:
    """What `gradwire.Flexible` is told; raises ConfigError as `_auto_options`."""
    _check_known(FLEXIBLE, options, ("steps", "seconds", *_OF_TRIGGERS))
    given: dict[str, Any] = dict(options)
    of_triggers = {name: given.pop(name) for name in _OF_TRIGGERS if name in given}
    check_numbers(**given)
    return {**given, "triggers": Triggers(**of_triggers)}


def _check_known(method: str, given: Options, known: tuple[str, ...]) -> None:
    for name in (one for one in given if one not in known):
        raise ConfigError(f"method {method} has no option {name!r}: {use_one_of(name, known)}")


def _flexible(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, options: Options
) -> Applied:
    """`flexible` at work. The step alone says where in the data and in the schedule of the learning
    rate training is, so that nothing else has a state that a trial would change."""
    handle = gradwire.attach(model, _FIRST)
    decides = gradwire.Flexible(handle, model, optimizer, **_flexible_options(options))

    def remove() -> None:
        decides.close()
        handle.detach()

    def load(state: dict[str, Any]) -> None:
        # Whatever density was in force: residuals of all have the same form.
        facts = {p.name: p.facts() for p in handle.plan.parameters}
        handle.load_state_dict({**state, "parameters": facts})

    return replace(of_handle(handle), flexible=decides, remove=remove, load=load)


_APPLY: dict[str, Callable[[DistributedDataParallel, Options], Applied]] = {
    "torch_fp32": torch_cast,
    "torch_cast": torch_cast,
    "torch_powersgd": torch_powersgd,
    "truncate": truncate,
    "gradwire": lambda model, options: of_handle(attach(model, options)),
}
