"""The methods that `bench train` compares: ways for DDP to average gradients.

A method is named by an entry of `NAMED`, as `torch-powersgd:rank=R`, or spelt out as
`CODEC:OPTION=VALUE:...`, with or without `gradwire:` before it. CODEC may be an aggregator; the
options are those of `gradwire.attach`, of `gradwire.Options` and of the codec
(`qsgd:bits=2:block=1024:coordinated=true`).

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

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import codecs
from gradwire.aggregators import Aggregator, Compressed, registry
from gradwire.codecs.text import parse as parse_text
from gradwire.errors import ConfigError
from gradwire.lang import Codec

Options = dict[str, "int | float | bool | str"]


@dataclass(frozen=True)
class Traffic:
    """What a method has sent from this rank since it was applied, and what memory it took.

    Attributes:
        wire_bytes: bytes, by the rules of this module's docstring.
        peak_extra_bytes: memory beyond plain DDP; None where the method does not count it.
    """

    wire_bytes: int
    peak_extra_bytes: int | None


@dataclass(frozen=True)
class Applied:
    """A method at work on one DDP model.

    Attributes:
        traffic: traffic after the given number of steps.
        remove: gives back what the method holds; the model is not trained after it.
        handle: of gradwire's methods.
    """

    traffic: Callable[[int], Traffic]
    remove: Callable[[], None]
    handle: gradwire.Handle | None = None


@dataclass(frozen=True)
class Method:
    """A method by name.

    Attributes:
        kind: which function of `_APPLY` puts it on a model.
        options: what that function is given.
        bucket_mb: DDP's `bucket_cap_mb`; None for its default.
    """

    name: str
    kind: str
    options: Options = field(default_factory=dict)
    bucket_mb: int | None = None

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
    kind, _, rest = text.partition(":")
    if kind == "torch-powersgd":
        return _with_rank(text, NAMED[kind])
    if kind.strip() in {*codecs.REGISTRY, *registry.REGISTRY}:
        kind, rest = "gradwire", text
    if kind != "gradwire" or not rest:
        raise ConfigError(
            f"unknown method {text!r}; known: {', '.join(NAMED)}, or CODEC:OPTION=VALUE:..."
        )
    try:
        codec, options = parse_text(rest)
    except ConfigError as error:
        raise ConfigError(f"method {error}") from error
    if "codec" in options:
        raise ConfigError(f"method {text!r}: option 'codec' is given twice")
    return Method(text, "gradwire", {"codec": codec, **options})


def _with_rank(text: str, method: Method) -> Method:
    """`torch-powersgd:rank=R`."""
    options = parse_text(text)[1]
    rank = options.get("rank")
    if set(options) != {"rank"} or type(rank) is not int or rank < 1:
        raise ConfigError(f"method {text!r}: torch's hook takes rank=R, a whole number from 1 up")
    return replace(method, name=text, options=options)


def ring_bytes(numel: int, bytes_per_value: int, world_size: int) -> int:
    """What each rank sends in a ring all-reduce: 2 (N-1)/N of the data."""
    return round(2 * (world_size - 1) / world_size * numel * bytes_per_value)


def _torch_fp32(model: DistributedDataParallel, options: Options) -> Applied:
    step_bytes = ring_bytes(_numel(model), 4, _world_size(model))
    return Applied(lambda steps: Traffic(steps * step_bytes, 0), _nothing)


def _torch_cast(model: DistributedDataParallel, options: Options) -> Applied:
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": _bf16_compress_hook}
    model.register_comm_hook(None, hooks[str(options["dtype"])])
    step_bytes = ring_bytes(_numel(model), 2, _world_size(model))
    return Applied(lambda steps: Traffic(steps * step_bytes, None), _nothing)


def _bf16_compress_hook(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Torch's own hook. DDP refuses it by its name without NCCL, though gloo reduces bf16."""
    return default_hooks.bf16_compress_hook(group, bucket)


# DDP compares a hook's annotations with the types themselves; ours are strings in this module.
_bf16_compress_hook.__annotations__ = {
    "bucket": dist.GradBucket,
    "return": torch.futures.Future[torch.Tensor],
}


def _torch_powersgd(model: DistributedDataParallel, options: Options) -> Applied:
    dense_steps = 2  # the fewest that torch allows with error feedback
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=int(options["rank"]),
        start_powerSGD_iter=dense_steps,
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    numel, world_size = _numel(model), _world_size(model)

    def traffic(steps: int) -> Traffic:
        reduced = min(steps, dense_steps) * numel + state.total_numel_after_compression
        return Traffic(ring_bytes(reduced, 4, world_size), None)

    return Applied(traffic, _nothing)


def _gradwire(model: DistributedDataParallel, options: Options) -> Applied:
    handle = attach(model, options)

    def traffic(steps: int) -> Traffic:
        stats = handle.stats()
        return Traffic(int(stats["wire_bytes"]), int(stats["peak_extra_bytes"]))

    return Applied(traffic, handle.detach, handle)


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
    "torch_fp32": _torch_fp32,
    "torch_cast": _torch_cast,
    "torch_powersgd": _torch_powersgd,
    "gradwire": _gradwire,
}


def _nothing() -> None:
    """Torch's hooks cannot be taken off; they go with their model."""


def _numel(model: DistributedDataParallel) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _world_size(model: DistributedDataParallel) -> int:
    return int(model.process_group.size())
