"""The methods that `bench train --sharded` compares: ways for FSDP2 to send weights and gradients.

    fsdp-fp32                    torch's collectives, 32 bits
    fsdp-bf16                    torch's collectives, weights and gradients cast to bf16 to be sent
    fsdp-mixed                   torch's collectives, fp32 weights and fp16 gradients (THESIS 5.6)
    gradwire:w=CODEC:g=CODEC     gw.attach(model, CODEC of g, weights=CODEC of w)
    qsdp:w=BITS:g=BITS           the same with RandomShift for weights and QSGD for gradients
    qsdp:w=BITSdiff:g=BITS       weights as differences: keep="reference"
    qsdp:w=BITS:g=BITS:learned   both in LearnedLevels, learned after the steps `LEARN_AT`
    truncate:w=RATIO:g=RATIO     the first 1/RATIO of fp32 values, by torch; for timing only

What follows `w=...` or `g=...` is an option of that codec (`w=randomshift:bits=5:block=512`), but
for `keep`, `error_feedback` and `inside=full`, which are options of `gradwire.attach`. With the
last, gradients go between machines through the codec, and uncompressed within a machine.

With several ranks per machine they shard the model within each, and replicate it between them
(HSDP). Torch's methods all-reduce the shards of the replicas in the width of gradients.

All methods have one mixed-precision policy, `POLICY`: FSDP2 computes with fp32 weights and reduces
fp32 gradients. Methods differ in what is sent alone. FSDP2's own policy for bf16 would change what
is computed, too.

Bytes of torch's collectives are a formula, since torch does not count: an all-gather sends (N-1)
times the bytes of a rank's part, a reduce-scatter (N-1)/N of the bytes of its input, at the width
that is sent, and an all-reduce between R replicas 2 (R-1)/R. gloo's reduce-scatter is an all-reduce
inside and sends twice as much: `link_bytes` has what really left the node, where a network is
emulated.

`fully_shard` wraps every entry of a ModuleList (the blocks of a transformer), every other layer of
`LARGE` values or more, then the root. FSDP2's defaults hold: the root's weights are gathered once
per step, those of others twice.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import gradwire
from gradwire.aggregators import Compressed, registry
from gradwire.errors import ConfigError, use_one_of
from gradwire.handles.fsdp import (
    Allocates,
    FSDPAllGather,
    FSDPReduceScatter,
    parameter_groups,
    process_groups,
    replace_replicas,
)
from gradwire.handles.scatter import Replicas
from gradwire.planner.weights import KEEP, WeightRules, in_blocks
from gradwire_tools.bench.tasks import Task
from gradwire_tools.bench.train.applied import Applied, compiled, of_handle
from gradwire_tools.bench.train.methods import Shapes

POLICY = "param fp32, reduce fp32"  # of every method, as rows have it
_POLICY = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)

LARGE = 1 << 16  # values of a layer that is a group of its own


@dataclass(frozen=True)
class ShardedMethod:
    """A method by name, as `Method`."""

    name: str
    ours: bool  # whether gradwire sends, or torch
    # What they are sent in: a codec's text, None for uncompressed by FSDP2 (weights) or gradwire
    # (gradients); of torch's methods "fp32", "fp16" or "bf16".
    weights: str | None
    gradients: str | None
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of `gradwire.attach`
    learned: bool = False  # whether levels are learned in training
    ratios: tuple[float, float] | None = None  # of `truncate`: how much less is sent of each
    shards: int | None = None  # ranks that hold one replica; None: all

    watches = False  # the network, while it trains
    meets, cycle = False, (1, 0)
    cross_barrier = False  # FSDP2 gathers weights layer by layer

    @property
    def timing_only(self) -> bool:
        return self.ratios is not None

    @property
    def collectives(self) -> gradwire.Options:
        """How its collectives run."""
        given = {name: self.options[name] for name in _OF_COLLECTIVES if name in self.options}
        if "inside" in given:
            given["algorithm"] = "hierarchical"
        return gradwire.Options(**given)

    def check(self, ranks: int = 1, shapes: Shapes = ()) -> None:
        """Whether it can be attached, told before anything is launched; to any model.

        Raises:
            ConfigError: gradwire does not know a codec or an option, or it is not for this use.
        """
        if not self.ours:
            return
        try:
            WeightRules.of(self.weights, self.options.get("keep"))
            if self.weights is None and "keep" in self.options:
                raise ConfigError("keep is for weights in a codec: give w=CODEC, too")
            if self.gradients is not None:
                made = registry.get(in_blocks(self.gradients))
                if not isinstance(made, Compressed):
                    raise ConfigError(f"g={self.gradients}: FSDP2 scatters through a single codec")
            of = [text.split(":")[0] for text in (self.weights, self.gradients) if text]
            if self.learned and "learnedlevels" not in of:
                raise ConfigError("learned is for a codec with levels: w= or g=learnedlevels")
        except ConfigError as error:
            raise ConfigError(f"method {self.name!r}: {error}") from error

    def distribute(self, model: nn.Module) -> nn.Module:
        """The model under FSDP2, over all ranks or with replicas of shards."""
        ranks, device = dist.get_world_size(), next(model.parameters()).device.type
        shape = (ranks,) if self.shards is None else (ranks // self.shards, self.shards)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        for module in (*layers(model), model):
            fully_shard(module, mesh=mesh, mp_policy=_POLICY)
        return model

    def optimizer(self, task: Task, model: nn.Module) -> torch.optim.Optimizer:
        """The task's."""
        return task.optimizer(model)

    def apply(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Applied:
        """Puts the method on a model of `distribute`. Gathers that gradwire leaves to torch are
        counted, too.

        Raises:
            ConfigError: gradwire cannot attach it.
        """
        widths = ("fp32", "fp32") if self.ours else (str(self.weights), str(self.gradients))
        ratios = self.ratios or (1.0, 1.0)
        gather, scatter = TorchGather(widths[0], ratios[0]), TorchScatter(widths[1], ratios[1])
        hop = TorchHop(widths[1], ratios[1])
        by_torch = not self.ours or self.weights is None
        of_gradients = (None, None) if self.ours else (scatter, hop)
        communicate(model, gather if by_torch else None, *of_gradients)
        applied, handle = Applied(lambda steps: {}), None
        if self.ours:
            given = {"weights": self.weights, **self.options}
            given["options"] = self.collectives
            for name in _OF_COLLECTIVES:
                given.pop(name, None)
            handle = compiled(gradwire.attach(model, self.gradients, **given))
            applied = of_handle(handle)

        def traffic(steps: int) -> dict[str, Any]:
            stats = {} if handle is None else handle.stats()
            weights = gather.wire_bytes + int(stats.get("weights_wire_bytes", 0))
            between = hop.wire_bytes + int(stats.get("replicas_wire_bytes", 0))
            gradients = scatter.wire_bytes + hop.wire_bytes + int(stats.get("wire_bytes", 0))
            return {
                "wire_bytes": weights + gradients,
                "peak_extra_bytes": None,
                "weights_wire_bytes": weights,
                "gradients_wire_bytes": gradients,
                **({} if self.shards is None else {"replicas_wire_bytes": between}),
            }

        return replace(applied, traffic=traffic)


NAMED: dict[str, ShardedMethod] = {
    method.name: method
    for method in (
        ShardedMethod("fsdp-fp32", False, "fp32", "fp32"),
        ShardedMethod("fsdp-bf16", False, "bf16", "bf16"),
        ShardedMethod("fsdp-mixed", False, "fp32", "fp16"),
    )
}
# Without --methods; and those of --quick.
COMPARED = (
    *NAMED, "gradwire:w=bf16:g=bf16", "qsdp:w=8:g=8", "qsdp:w=6:g=4", "qsdp:w=4diff:g=4",
)  # fmt: skip
COMPARED_QUICKLY = ("fsdp-fp32", "fsdp-bf16", "qsdp:w=8:g=8")

KNOWN = (
    *(*NAMED, "gradwire:w=CODEC:g=CODEC", "qsdp:w=BITS[diff]:g=BITS[:learned]"),
    "truncate:w=RATIO:g=RATIO",
)
_OPTIONS: dict[str, dict[str, Any]] = {
    "keep": {name: name for name in KEEP},
    "error_feedback": {"true": True, "false": False},
    "inside": {"full": "full"},
}
_OF_COLLECTIVES = ("keep", "inside")  # are fields of gradwire.Options
_QSDP = {"w": "randomshift", "g": "qsgd"}
_LEARNED = {"w": "learnedlevels", "g": "learnedlevels:rounding=stochastic"}


def knows(text: str) -> bool:
    """Whether `text` names a method of `--sharded`, with valid options or not."""
    form = r"\s*(qsdp\s*(:|$)|(truncate|gradwire)\s*:\s*[wg]=)"
    return text in NAMED or re.match(form, text) is not None


def parse(text: str) -> ShardedMethod:
    """The method that `text` names.

    Raises:
        ConfigError: there is none; the message lists the known ones.
    """
    if text in NAMED:
        return NAMED[text]
    if not knows(text):
        raise ConfigError(f"unknown method {text!r} with --sharded: {use_one_of(text, KNOWN)}")
    kind, *parts = (part.strip() for part in text.split(":"))
    if kind == "truncate":
        ratio = r"(\d+(?:\.\d+)?)"
        match = re.fullmatch(rf"w={ratio}:g={ratio}", ":".join(parts))
        weights, gradients = map(float, match.groups() if match else (0, 0))
        if min(weights, gradients) < 1:
            raise ConfigError(
                f"method {text!r}: write truncate:w=RATIO:g=RATIO, with numbers of 1 or more"
            )
        return ShardedMethod(text, False, "fp32", "fp32", ratios=(weights, gradients))
    learned = "learned" in parts
    codecs, options = _sorted(text, [part for part in parts if part != "learned"])
    of_bits = _LEARNED if learned else _QSDP
    if kind == "qsdp":
        if set(codecs) != {"w", "g"}:
            raise ConfigError(f"method {text!r}: write qsdp:w=BITS:g=BITS")
        for of, value in codecs.items():
            bits, colon, rest = value.partition(":")
            found = re.fullmatch(r"(\d+)(diff)?" if of == "w" else r"(\d+)()", bits)
            if found is None:
                raise ConfigError(f"method {text!r}: {of}={bits} is no number of bits")
            codecs[of] = f"{of_bits[of]}:bits={found[1]}{colon}{rest}"
            if found[2] and options.setdefault("keep", "reference") != "reference":
                raise ConfigError(f"method {text!r}: differences of weights need keep=reference")
    return ShardedMethod(text, True, codecs.get("w"), codecs.get("g"), options, learned)


def _sorted(text: str, parts: list[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """(codecs' texts of w and g, options of `attach`)."""
    codecs: dict[str, str] = {}
    options: dict[str, Any] = {}
    codec = None  # whose options follow
    for part in parts:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ConfigError(f"method {text!r}: expected OPTION=VALUE, found {part!r}")
        if name in codecs or name in options:
            raise ConfigError(f"method {text!r}: {name!r} is given twice")
        if name in ("w", "g"):
            codec, codecs[name] = name, value
        elif name in _OPTIONS:
            if value not in _OPTIONS[name]:
                raise ConfigError(f"method {text!r}: {name} is one of {', '.join(_OPTIONS[name])}")
            options[name] = _OPTIONS[name][value]
        elif codec is None:
            raise ConfigError(f"method {text!r}: {part!r} comes before w= and g=")
        else:
            codecs[codec] += f":{part}"
    return codecs, options


def layers(model: nn.Module) -> list[nn.Module]:
    """What is sharded by itself; tied weights are left to the root."""
    uses = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.extend(child)
                continue
            own = list(child.parameters(recurse=False))
            tied = any(uses[p] > 1 for p in own)
            if sum(p.numel() for p in own) >= LARGE and not tied:
                found.append(child)
            visit(child)

    visit(model)
    return found


def groups(model: nn.Module) -> list[tuple[str, FSDPModule]]:
    """The parts of a model that FSDP2 gathers by themselves, with their prefixes."""
    return [(name, part) for name, part in model.named_modules() if isinstance(part, FSDPModule)]


def communicate(
    model: nn.Module, gather: TorchGather | None, scatter: TorchScatter | None, hop: TorchHop | None
) -> None:
    """Have FSDP2 use these in place of its own collectives; the last one where it has replicas."""
    for _, module in groups(model):
        if gather is not None:
            module.set_custom_all_gather(gather)
        if scatter is not None:
            module.set_custom_reduce_scatter(scatter)
    for _, record in parameter_groups(model):
        if hop is not None and (between := process_groups(record).replicas) is not None:
            between = between.group if isinstance(between, Replicas) else between
            replace_replicas(record, Replicas(between, partial(hop, between)))


_WIDTHS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def kept(numel: int, ratio: float) -> int:
    """How many of `numel` values are sent: at least one, if there are any."""
    return math.ceil(numel / ratio)


class _Torchs(Allocates):
    """A collective of the first 1/`ratio` of each rank's part, of values cast to `width`.

    Attributes:
        sends: if not, a rank's own values take the place of every other's.
        wire_bytes: by the formula, so far.
    """

    def __init__(self, width: str = "fp32", ratio: float = 1, sends: bool = True) -> None:
        self.width, self.ratio, self.sends = _WIDTHS[width], ratio, sends
        self.wire_bytes = 0


class TorchGather(_Torchs, FSDPAllGather):
    """Torch's all-gather of weights."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        parts = output_tensor.view(group.size(), -1)
        if not self.sends:
            parts.copy_(input_tensor.clone())
            return None
        own = input_tensor[: kept(input_tensor.numel(), self.ratio)].to(self.width)
        self.wire_bytes += (group.size() - 1) * own.nbytes
        if own.dtype == input_tensor.dtype and own.numel() == input_tensor.numel():
            return dist.all_gather_into_tensor(output_tensor, own, group, async_op)
        every = own.new_empty(group.size(), own.numel())
        dist.all_gather_into_tensor(every.view(-1), own, group)
        parts[:, own.numel() :].zero_()
        parts[:, : own.numel()].copy_(every)
        return None


class TorchScatter(_Torchs, FSDPReduceScatter):
    """Torch's reduce-scatter of gradients; 16-bit values are divided by the number of ranks before
    they are summed, as in DDP's hooks."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Any:
        parts = input_tensor.view(group.size(), -1)
        if not self.sends:
            output_tensor.copy_(parts[group.rank()])
            return None
        count = kept(output_tensor.numel(), self.ratio)
        every = parts[:, :count].to(self.width).contiguous()
        self.wire_bytes += (group.size() - 1) * every.nbytes // group.size()
        cast = every.dtype != input_tensor.dtype
        if not cast and count == output_tensor.numel():
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        if cast:
            assert op == dist.ReduceOp.AVG
            every.div_(group.size())
            op = dist.ReduceOp.SUM
        own = every.new_empty(count)
        dist.reduce_scatter_tensor(own, every.view(-1), op, group)
        output_tensor[count:].zero_()
        output_tensor[:count].copy_(own)
        return None


class TorchHop(_Torchs):
    """Torch's all-reduce of gradients between replicas; 16-bit values as in `TorchScatter`."""

    def __call__(self, group: dist.ProcessGroup, values: torch.Tensor, op: Any) -> None:
        if not self.sends:
            return
        ranks = group.size()
        own = values[: kept(values.numel(), self.ratio)].to(self.width)
        self.wire_bytes += 2 * (ranks - 1) * own.nbytes // ranks
        cast = own.dtype != values.dtype
        if cast:
            assert op == dist.ReduceOp.AVG
            own.div_(ranks)
        dist.all_reduce(own, dist.ReduceOp.SUM if cast else op, group)
        values[own.numel() :].zero_()
        values[: own.numel()].copy_(own)
