"""What sends in place of gradwire: torch's hooks of DDP, its collectives under FSDP2, `truncate`.

Under FSDP2 the bytes that a rank sends are a formula, since torch does not count:

    all-gather        (N-1) times the bytes of a rank's part
    reduce-scatter    (N-1)/N of the bytes of its input

at the width that is sent. gloo's reduce-scatter is an all-reduce inside and sends twice as much:
`link_bytes` has what really left the node, where a network is emulated.

`truncate` sends only the first 1/ratio of each bucket, uncompressed: a bound on what compressing
could pay (CGX Fig. 1; THESIS C.2, Fig. C.1), a codec of that ratio that takes no time. The rest
arrives as zeros, so that ranks agree and nothing diverges, but what is trained is not the model:
its rows are marked `timing_only`.
"""

# Annotations are types, not strings: DDP compares a hook's with the types themselves.
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.nn.parallel import DistributedDataParallel

import gradwire

Options = dict[str, "int | float | bool | str"]
WIDTHS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Traffic:
    """What a method has sent from this rank since it was applied, and what memory it took.

    Attributes:
        wire_bytes: bytes, by the rules of `methods`' docstring.
        peak_extra_bytes: memory beyond plain DDP; None where the method does not count it.
        weights_wire_bytes: those of `wire_bytes` that carry weights; None under DDP, which sends
            gradients alone.
    """

    wire_bytes: int
    peak_extra_bytes: int | None
    weights_wire_bytes: int | None = None

    def keys(self) -> dict[str, int | None]:
        """What rows have of it."""
        keys = {"wire_bytes": self.wire_bytes, "peak_extra_bytes": self.peak_extra_bytes}
        if self.weights_wire_bytes is not None:
            keys["weights_wire_bytes"] = self.weights_wire_bytes
            keys["gradients_wire_bytes"] = self.wire_bytes - self.weights_wire_bytes
        return keys


@dataclass(frozen=True)
class Applied:
    """A method at work on one model, under DDP or FSDP2.

    Attributes:
        traffic: what it has sent after the given number of steps.
        remove: gives back what the method holds; the model is not trained after it. Torch's hooks
            cannot be taken off; they go with their model.
        state, load: this rank's state, of what `torch.load(weights_only=True)` reads; its inverse.
        handle: of gradwire's methods.
        flexible: what decides about it after each step of the optimizer.
        setup_seconds: that it has measured for before the first step; they count as training.
    """

    traffic: Callable[[int], Traffic]
    remove: Callable[[], None] = lambda: None
    state: Callable[[], dict[str, Any]] = dict
    load: Callable[[dict[str, Any]], None] = lambda state: None
    handle: gradwire.Handle | None = None
    flexible: gradwire.Flexible | None = None
    setup_seconds: float = 0.0

    def stepped(self) -> bool:
        """Called after each step of the optimizer; whether it was training, rather than a step that
        is thrown away."""
        return self.flexible is None or self.flexible.step()


def of_handle(handle: gradwire.Handle) -> Applied:
    """A method of gradwire's at work."""

    def traffic(steps: int) -> Traffic:
        stats = handle.stats()
        return Traffic(int(stats["wire_bytes"]), int(stats["peak_extra_bytes"]))

    return Applied(traffic, handle.detach, handle.state_dict, handle.load_state_dict, handle)


def ring_bytes(numel: int, bytes_per_value: int, world_size: int) -> int:
    """What each rank sends in a ring all-reduce: 2 (N-1)/N of the data."""
    return round(2 * (world_size - 1) / world_size * numel * bytes_per_value)


def torch_cast(model: DistributedDataParallel, options: Options) -> Applied:
    dtype = str(options["dtype"])
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": _bf16_compress_hook}
    if dtype != "fp32":
        model.register_comm_hook(None, hooks[dtype])
    step_bytes = ring_bytes(_numel(model), 4 if dtype == "fp32" else 2, _world_size(model))
    extra = 0 if dtype == "fp32" else None
    return Applied(lambda steps: Traffic(steps * step_bytes, extra))


def _bf16_compress_hook(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Torch's own hook. DDP refuses it by its name without NCCL, though gloo reduces bf16."""
    return default_hooks.bf16_compress_hook(group, bucket)


_DENSE_STEPS = 2  # of PowerSGD: the fewest that torch allows with error feedback
_POWERSGD_STATE = (
    *("error_dict", "p_memory_dict", "q_memory_dict", "iter", "total_numel_before_compression"),
    *("total_numel_after_compression", "next_stats_report"),
)


def torch_powersgd(model: DistributedDataParallel, options: Options) -> Applied:
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=int(options["rank"]),
        start_powerSGD_iter=_DENSE_STEPS,
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    numel, world_size = _numel(model), _world_size(model)

    def traffic(steps: int) -> Traffic:
        reduced = min(steps, _DENSE_STEPS) * numel + state.total_numel_after_compression
        return Traffic(ring_bytes(reduced, 4, world_size), None)

    def saved() -> dict[str, Any]:
        kind, keys, at, has_gauss, gauss = state.rng.get_state()
        draws = [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), at, has_gauss, gauss]
        return {name: getattr(state, name) for name in _POWERSGD_STATE} | {"rng": draws}

    def load(found: dict[str, Any]) -> None:
        for name in _POWERSGD_STATE:
            setattr(state, name, found[name])
        kind, keys, *rest = found["rng"]
        state.rng.set_state((kind, keys.numpy().astype(np.uint32), *rest))

    return Applied(traffic, state=saved, load=load)


def truncate(model: DistributedDataParallel, options: Options) -> Applied:
    ratio, world_size = float(options["ratio"]), _world_size(model)
    sent = [0]

    def hook(group: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        values = bucket.buffer()
        first = values[: max(1, int(values.numel() / ratio))]
        sent[0] += first.numel()
        values[first.numel() :] = 0
        first /= world_size
        done = dist.all_reduce(first, group=model.process_group, async_op=True).get_future()
        whole: torch.futures.Future[torch.Tensor] = done.then(lambda _: values)
        return whole

    model.register_comm_hook(None, hook)
    return Applied(lambda steps: Traffic(ring_bytes(sent[0], 4, world_size), None))


def _numel(model: DistributedDataParallel) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _world_size(model: DistributedDataParallel) -> int:
    return int(model.process_group.size())


def kept(numel: int, ratio: float) -> int:
    """How many of `numel` values are sent: at least one, if there are any."""
    return math.ceil(numel / ratio)


class _Torchs:
    """A collective of the first 1/`ratio` of each rank's part, of values cast to `width`.

    Attributes:
        sends: if not, a rank's own values take the place of every other's.
        wire_bytes: by the formula, so far.
    """

    def __init__(self, width: str = "fp32", ratio: float = 1, sends: bool = True) -> None:
        self.width, self.ratio, self.sends = WIDTHS[width], ratio, sends
        self.wire_bytes = 0

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class TorchGather(_Torchs, AllGather):
    """Torch's all-gather of weights."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        parts = output_tensor.view(group.size(), -1)
        if not self.sends:
            parts.copy_(input_tensor.clone())
            return None
        own = input_tensor[: kept(input_tensor.numel(), self.ratio)].to(self.width)
        self.wire_bytes += (group.size() - 1) * own.nbytes
        if own.dtype == input_tensor.dtype and own.numel() == input_tensor.numel():
            work: dist.Work | None = dist.all_gather_into_tensor(
                output_tensor, own, group, async_op
            )
            return work
        every = own.new_empty(group.size(), own.numel())
        dist.all_gather_into_tensor(every.view(-1), own, group)
        parts[:, own.numel() :].zero_()
        parts[:, : own.numel()].copy_(every)
        return None


class TorchScatter(_Torchs, ReduceScatter):
    """Torch's reduce-scatter of gradients; 16-bit values are divided by the number of ranks before
    they are summed, as in DDP's hooks."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        parts = input_tensor.view(group.size(), -1)
        if not self.sends:
            output_tensor.copy_(parts[group.rank()])
            return None
        count = kept(output_tensor.numel(), self.ratio)
        every = parts[:, :count].to(self.width).contiguous()
        self.wire_bytes += (group.size() - 1) * every.nbytes // group.size()
        cast = every.dtype != input_tensor.dtype
        if not cast and count == output_tensor.numel():
            work: dist.Work | None = dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op, group, async_op
            )
            return work
        if cast:
            assert op == dist.ReduceOp.AVG
            every.div_(group.size())
            op = dist.ReduceOp.SUM
        own = every.new_empty(count)
        dist.reduce_scatter_tensor(own, every.view(-1), op, group)
        output_tensor[count:].zero_()
        output_tensor[:count].copy_(own)
        return None
