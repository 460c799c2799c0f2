"""Methods at work on a model: what each has sent, and its state; torch's own for DDP.

Bytes. For torch's own methods `wire_bytes` is a formula, since torch does not count: gloo's ring
all-reduce sends 2 (N-1)/N of the gradient's bytes from each rank, at the width of the hook's type;
for PowerSGD, of the factors that its state says it reduced. For gradwire it is what the hook
counted, message headers included. Where a network is emulated, rows carry what the node's interface
sent too.
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
from gradwire.errors import ConfigError
from gradwire.lang.kernels import MEND
from gradwire_tools.bench.given import as_hook

Options = dict[str, int | float | bool | str]


@dataclass(frozen=True)
class Applied:
    """A method at work on one model, under DDP or FSDP2.

    Attributes:
        traffic: what it has sent from this rank after the given number of steps, and what memory
            it took, as rows have it: `wire_bytes`, by the rules above; `peak_extra_bytes`
            beyond plain DDP, None where the method does not count it; under FSDP2, those of
            `wire_bytes` that carry weights and gradients.
        remove: gives back what the method holds; the model is not trained after it. Torch's hooks
            cannot be taken off; they go with their model.
        state, load: this rank's state, of what `torch.load(weights_only=True)` reads; its inverse.
        handle: of gradwire's methods.
        flexible: what decides about it after each step of the optimizer.
        settle: waits for what is under way; it sends nothing afterwards until the next step.
        setup_seconds: that it has measured for before the first step; they count as training.
    """

    traffic: Callable[[int], dict[str, Any]]
    remove: Callable[[], None] = lambda: None
    state: Callable[[], dict[str, Any]] = dict
    load: Callable[[dict[str, Any]], None] = lambda state: None
    handle: gradwire.Handle | None = None
    flexible: gradwire.Flexible | None = None
    settle: Callable[[], None] | None = None
    setup_seconds: float = 0.0

    def stepped(self) -> bool:
        """Called after each step of the optimizer; whether it was training, rather than a step that
        is thrown away."""
        return self.flexible is None or self.flexible.step()


def of_handle(handle: gradwire.Handle) -> Applied:
    """A method of gradwire's at work."""

    def traffic(steps: int) -> dict[str, Any]:
        stats = handle.stats()
        return {key: int(stats[key]) for key in ("wire_bytes", "peak_extra_bytes")}

    return Applied(traffic, handle.detach, handle.state_dict, handle.load_state_dict, handle)


def compiled(handle: gradwire.Handle) -> gradwire.Handle:
    """The handle.

    Raises:
        ConfigError: bf16 is sent in place of its codec, so rows of that name would be false.
    """
    if handle.plan.rules.uncompiled:
        raise not_compiled("a rank", handle.plan.rules.uncompiled)
    return handle


def not_compiled(what: str, reason: str) -> ConfigError:
    """What a method is refused by that would be sent as bf16."""
    return ConfigError(f"{what}: no compiled kernels to measure: {reason}; {MEND}")


# Torch's bf16 hook by another name, by which DDP refuses it without NCCL; gloo reduces bf16.
_CAST: dict[str, Callable[..., Any]] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket),  # noqa: PLW0108
}


def torch_cast(model: DistributedDataParallel, options: Options) -> Applied:
    """Torch's hook that casts to `dtype`; for fp32, what DDP does without a hook."""
    dtype = str(options["dtype"])
    if dtype in _CAST:
        model.register_comm_hook(None, _CAST[dtype])
    of_step = ring_bytes(_numel(model), 2 if dtype in _CAST else 4, dist.get_world_size())
    extra = None if dtype in _CAST else 0
    return Applied(lambda steps: {"wire_bytes": steps * of_step, "peak_extra_bytes": extra})


_DENSE_STEPS = 2  # of PowerSGD: the fewest that torch allows with error feedback
_POWERSGD_STATE = (
    *("error_dict", "p_memory_dict", "q_memory_dict", "iter", "total_numel_before_compression"),
    *("total_numel_after_compression", "next_stats_report"),
)


def torch_powersgd(model: DistributedDataParallel, options: Options) -> Applied:
    """Torch's PowerSGD hook of this `rank`."""
    rank = int(options["rank"])
    state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=_DENSE_STEPS)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    numel = _numel(model)

    def reduced(steps: int) -> int:
        return min(steps, _DENSE_STEPS) * numel + int(state.total_numel_after_compression)

    def saved() -> dict[str, Any]:
        kind, keys, at, has_gauss, gauss = state.rng.get_state()
        draws = [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), at, has_gauss, gauss]
        return {name: getattr(state, name) for name in _POWERSGD_STATE} | {"rng": draws}

    def load(found: dict[str, Any]) -> None:
        for name in _POWERSGD_STATE:
            setattr(state, name, found[name])
        kind, keys, *rest = found["rng"]
        state.rng.set_state((kind, keys.numpy().astype(np.uint32), *rest))

    return Applied(_of_values(reduced), state=saved, load=load)


def truncate(model: DistributedDataParallel, options: Options) -> Applied:
    """Sends the first 1/`ratio` of each bucket; the rest is zeros."""
    ratio, sent = float(options["ratio"]), [0]

    @as_hook
    def hook(group: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        values = bucket.buffer()
        first = values[: max(1, int(values.numel() / ratio))]
        sent[0] += first.numel()
        values[first.numel() :] = 0
        first /= model.process_group.size()
        done = dist.all_reduce(first, group=model.process_group, async_op=True).get_future()
        whole: torch.futures.Future[torch.Tensor] = done.then(lambda _: values)
        return whole

    model.register_comm_hook(None, hook)
    return Applied(_of_values(lambda steps: sent[0]))


def _of_values(reduced: Callable[[int], int]) -> Callable[[int], dict[str, Any]]:
    """The traffic of a hook of torch's that has reduced so many fp32 values."""
    ranks = dist.get_world_size()
    return lambda steps: {
        "wire_bytes": ring_bytes(reduced(steps), 4, ranks), "peak_extra_bytes": None,
    }  # fmt: skip


def _numel(model: DistributedDataParallel) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def ring_bytes(numel: int, bytes_per_value: int, world_size: int) -> int:
    """What each rank sends in a ring all-reduce: 2 (N-1)/N of the data."""
    return round(2 * (world_size - 1) / world_size * numel * bytes_per_value)
