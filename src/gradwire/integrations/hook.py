"""The DDP communication hook, and its state, through which gradwire is attached and detached.

DDP takes a hook once and for all. While its state holds a reducer, gradients go through that; after
`detach` the hook averages them plainly, until another reducer is set. DDP reads the hook's
annotations as objects, so this file does not postpone their evaluation.
"""

from collections.abc import Callable
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import ConfigError
from gradwire.integrations.torch_versions import values_of


class HookState:
    """What one DDP module's hook holds.

    Attributes:
        reducer: gets each bucket; None after detach.
        first: called before the first bucket, unless there is a reducer then; it may attach one.
        attached: how many handles there have been; the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.reducer: Reducer | None = None
        self.first: Callable[[], None] | None = None
        self.attached = 0


class Reducer(Protocol):
    """Averages buckets."""

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start a bucket's average; the future gives its buffer."""
        ...


def hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks, through the reducer if there is one."""
    first, state.first = state.first, None
    if first is not None and state.reducer is None:
        first()
    if state.reducer is not None:
        return state.reducer.reduce(bucket)
    buffer = bucket.buffer()

    def ended(averaged: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        averaged.value()  # raises what the all-reduce ended with
        return buffer

    return average(values_of(bucket), state.group).then(ended)


def average(
    values: torch.Tensor, group: dist.ProcessGroup
) -> torch.futures.Future[list[torch.Tensor]]:
    """Average `values`, in place, through torch's own all-reduce; the future gives [values]."""
    values.div_(group.size())
    work = dist.all_reduce(values, group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future


# Beside the modules, not in them: a copy of a module has a reducer of its own, without a hook, so
# it must not inherit the state; and a saved module holds nothing of gradwire's.
_states: WeakKeyDictionary[DistributedDataParallel, HookState] = WeakKeyDictionary()


def hook_state(model: DistributedDataParallel) -> HookState:
    """The hook's state of `model`, registered on first use.

    Raises:
        ConfigError: what `check_module` refuses, or `model` has another communication hook.
    """
    check_module(model)
    state = _states.get(model)
    if state is None:
        state = HookState(model.process_group)
        try:
            model.register_comm_hook(state, hook)
        except RuntimeError as error:
            raise ConfigError(
                f"this DDP module has a communication hook already ({error}); attach before, or "
                "instead of, register_comm_hook and DDP(mixed_precision=...)"
            ) from error
        finally:
            # DDP notes the hook and its state in the module, for its Python reducer alone. There
            # they would be copied and saved with it, process group, locks and all.
            model._comm_hooks[:] = [e for e in model._comm_hooks if e[1] is not state]
        _states[model] = state
    return state


def check_module(model: DistributedDataParallel) -> None:
    """Raises ConfigError for what is no DDP module, or one whose gradients torch.compile
    synchronises."""
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"attach takes a DistributedDataParallel module, not {type(model).__name__}: "
            "wrap it first, attach(DistributedDataParallel(model))"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ConfigError(
            "this DDP module was made under torch._dynamo.config.optimize_ddp='python_reducer', "
            "which has no buckets: set it to another value before wrapping the module"
        )
