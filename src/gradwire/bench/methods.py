"""The methods that `bench train` compares: ways for DDP to average gradients.

A method is named by an entry of `NAMED`, or spelt out as `CODEC:OPTION=VALUE:...`, with or without
`gradwire:` before it. CODEC may be an aggregator; the options are those of `gradwire.attach`, of
`gradwire.Options` and of the codec (`qsgd:bits=2:block=1024:coordinated=true`). So are torch's
PowerSGD hook, `torch-powersgd:rank=R`, and `truncate:ratio=R` (see `torch_hooks`).

Bytes. For torch's own methods `wire_bytes` is a formula, since torch does not count: gloo's ring
all-reduce sends 2 (N-1)/N of the gradient's bytes from each rank, at the width of the hook's type;
for PowerSGD, of the factors that its state says it reduced. For gradwire it is what the hook
counted, message headers included. Where a network is emulated, rows carry what the node's interface
sent too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import codecs
from gradwire.aggregators import Aggregator, Compressed, registry
from gradwire.bench import torch_hooks
from gradwire.bench.torch_hooks import Applied, Options, Traffic, ring_bytes
from gradwire.codecs.text import parse as parse_text
from gradwire.errors import ConfigError
from gradwire.lang import Codec

__all__ = ["NAMED", "Applied", "Method", "Traffic", "attach", "parse", "ring_bytes"]


@dataclass(frozen=True)
class Method:
    """A method by name.

    Attributes:
        kind: which function of `_APPLY` puts it on a model.
        options: what that function is given.
        bucket_mb: DDP's `bucket_cap_mb`; None for its default.
        timing_only: whether it only shows what a step can cost: it does not train the model.
    """

    name: str
    kind: str
    options: Options = field(default_factory=dict)
    bucket_mb: int | None = None
    timing_only: bool = False

    def check(self) -> None:
        """Whether `apply` can succeed, told before anything is launched.

        Raises:
            ConfigError: gradwire does not know the codec, an option or the algorithm.
        """
        if self.kind == "gradwire":
            self._made()

    def how(self) -> tuple[Codec, gradwire.Options]:
        """Of a method of gradwire's, the codec and how its collectives run.

        Raises:
            ConfigError: as `check`, or it is an aggregator, which is more than one collective.
        """
        aggregator, options = self._made()
        if not isinstance(aggregator, Compressed):
            raise ConfigError(
                f"method {self.name!r}: {aggregator} takes several collectives; `bench train` "
                "compares such methods"
            )
        return aggregator.codec, options

    @property
    def replaces_momentum(self) -> bool:
        """Whether its averages include momentum, so that the optimizer must have none."""
        if self.kind != "gradwire":
            return False
        return bool(getattr(self._made()[0], "replaces_momentum", False))

    def _made(self) -> tuple[Aggregator, gradwire.Options]:
        attach_options = inspect.signature(gradwire.attach).parameters
        given, options = _split(self.options)
        more = {k: v for k, v in given.items() if k not in attach_options}
        try:
            made = registry.get(str(self.options["codec"]), **more)
            return made, gradwire.Options(**options)
        except ConfigError as error:
            raise ConfigError(f"method {self.name!r}: {error}") from error

    def distribute(self, model: nn.Module) -> DistributedDataParallel:
        """The model under DDP, bucketed as the method needs it."""
        return DistributedDataParallel(model, bucket_cap_mb=self.bucket_mb)

    def apply(self, model: DistributedDataParallel) -> Applied:
        """Registers the method's communication hook on `model`, once, before its first step.

        Raises:
            ConfigError: gradwire does not know the codec or an option.
        """
        return _APPLY[self.kind](model, self.options)


NAMED: dict[str, Method] = {
    method.name: method
    for method in (
        Method("torch-fp32", "torch_fp32"),
        Method("torch-fp16-hook", "torch_cast", {"dtype": "fp16"}),
        Method("torch-bf16-hook", "torch_cast", {"dtype": "bf16"}),
        # One bucket: the hook waits for collectives inside callbacks that run on gloo's own two
        # threads, so two buckets in flight wait for each other for ever (seen with torch 2.13).
        Method("torch-powersgd", "torch_powersgd", {"rank": 4}, bucket_mb=1 << 20),
        Method("gradwire-fp16", "gradwire", {"codec": "fp16"}),
        Method("gradwire-qsgd4", "gradwire", {"codec": "qsgd", "bits": 4}),
        Method("gradwire-terngrad", "gradwire", {"codec": "terngrad", "error_feedback": True}),
    )
}


def parse(text: str) -> Method:
    """The method that `text` names.

    Raises:
        ConfigError: no such name, or an option is not `name=value`; the message lists the known.
    """
    if text in NAMED:
        return NAMED[text]
    kind, _, rest = (part.strip() for part in text.partition(":"))
    if kind in _NUMBERS:
        return _with_number(text, kind)
    if kind in {*codecs.REGISTRY, *registry.REGISTRY}:
        kind, rest = "gradwire", text
    if kind != "gradwire" or not rest:
        raise ConfigError(
            f"unknown method {text!r}; known: {', '.join(NAMED)}, truncate:ratio=R, or "
            "CODEC:OPTION=VALUE:..."
        )
    try:
        codec, options = parse_text(rest)
    except ConfigError as error:
        raise ConfigError(f"method {error}") from error
    if "codec" in options:
        raise ConfigError(f"method {text!r}: option 'codec' is given twice")
    return Method(text, "gradwire", {"codec": codec, **options})


# Methods without gradwire that take one number: its name, whether it is whole, and the method.
_NUMBERS: dict[str, tuple[str, type, Method]] = {
    "torch-powersgd": ("rank", int, NAMED["torch-powersgd"]),
    "truncate": ("ratio", float, Method("truncate", "truncate", {"ratio": 4}, timing_only=True)),
}


def _with_number(text: str, kind: str) -> Method:
    """Such a method with its number; raises ConfigError for another option, or a number below 1."""
    name, number, base = _NUMBERS[kind]
    try:
        options = parse_text(text)[1]
    except ConfigError as error:
        raise ConfigError(f"method {error}") from error
    what = "a whole number" if number is int else "a number"
    value = options.get(name)
    allowed = (int,) if number is int else (int, float)
    if set(options) != {name} or type(value) not in allowed or not 1 <= float(value or 0) < 1e9:
        raise ConfigError(f"method {text!r}: write {kind}:{name}=N, with {what} of 1 or more")
    return replace(base, name=text, options={name: options[name]})


def _gradwire(model: DistributedDataParallel, options: Options) -> Applied:
    handle = attach(model, options)

    def traffic(steps: int) -> Traffic:
        stats = handle.stats()
        return Traffic(int(stats["wire_bytes"]), int(stats["peak_extra_bytes"]))

    return Applied(traffic, handle.detach, handle.state_dict, handle.load_state_dict, handle)


def attach(model: DistributedDataParallel, options: Options) -> gradwire.Handle:
    """A handle, by the options of a method of gradwire's.

    Raises:
        ConfigError: gradwire does not know one of them.
    """
    arguments, run = _split(options)
    handle: gradwire.Handle = gradwire.attach(model, options=gradwire.Options(**run), **arguments)
    return handle


def _split(options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what `attach` is given, what its `gradwire.Options` is made of)."""
    names = {option.name for option in fields(gradwire.Options)}
    run = {name: value for name, value in options.items() if name in names}
    return {name: value for name, value in options.items() if name not in names}, run


_APPLY: dict[str, Callable[[DistributedDataParallel, Options], Applied]] = {
    "torch_fp32": torch_hooks.torch_fp32,
    "torch_cast": torch_hooks.torch_cast,
    "torch_powersgd": torch_hooks.torch_powersgd,
    "truncate": torch_hooks.truncate,
    "gradwire": _gradwire,
}
