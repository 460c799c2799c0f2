"""Averaging without gradwire: torch's own hooks, and `truncate`, a bound on the gain.

`truncate` sends only the first 1/ratio of each bucket, uncompressed (CGX Fig. 1): a compressor of
that ratio that costs no computing. The rest of the average is zero, so that replicas agree and
nothing diverges, but what it trains is not the model: its rows are marked `timing_only`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire

Options = dict[str, "int | float | bool | str"]


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
    """A method at work on one model.

    Attributes:
        traffic: traffic after the given number of steps.
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


_ANNOTATIONS = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
# DDP compares a hook's annotations with the types themselves; ours are strings in this module.
_bf16_compress_hook.__annotations__ = _ANNOTATIONS

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

    # DDP compares a hook's annotations with the types themselves; ours are strings in this module.
    hook.__annotations__ = _ANNOTATIONS
    model.register_comm_hook(None, hook)
    return Applied(lambda steps: Traffic(ring_bytes(sent[0], 4, world_size), None))


def _numel(model: DistributedDataParallel) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _world_size(model: DistributedDataParallel) -> int:
    return int(model.process_group.size())
