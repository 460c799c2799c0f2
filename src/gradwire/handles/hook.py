"""The DDP communication hook and its state, for attach and detach.

A DDP module accepts one hook, for its lifetime. If the hook's state has a reducer, the reducer
averages gradients; after `detach` the hook averages them uncompressed. DDP reads the hook's
annotations as objects, so this file does not postpone their evaluation.
"""

from collections.abc import Callable
from typing import Protocol
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import ConfigError
from gradwire.handles.oversights import check_module
from gradwire.handles.torch_versions import values_of


class HookState:
    """The state of one DDP module's hook.

    Attributes:
        reducer: gets each bucket; None after detach.
        first: called before the first bucket if there is no reducer; it may attach one.
        attached: number of handles so far; equal on all ranks.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.group = model.process_group
        self._model = ref(model)
        self.reducer: Reducer | None = None
        self.first: Callable[[], None] | None = None
        self.attached = 0

    @property
    def model_is_gone(self) -> bool:
        """Whether the module has been deleted."""
        return self._model() is None

    def divides_by_active_ranks(self) -> bool:
        """Whether the module is in a `join` that asks for averages over the ranks with inputs."""
        model = self._model()
        return (
            model is not None
            and model._join_config.enable
            and not model._divide_by_initial_world_size
        )


class Reducer(Protocol):
    """Averages buckets."""

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start a bucket's average; the future gives its buffer."""
        ...


def hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks, through the reducer if there is one."""
    if state.divides_by_active_ranks():
        raise ConfigError(
            "join(divide_by_initial_world_size=False): a communication hook does not know how many "
            "ranks still have inputs, and divides by all of them: leave that argument out"
        )
    first, state.first = state.first, None
    if first is not None and state.reducer is None:
        first()
    if state.reducer is not None:
        return state.reducer.reduce(bucket)
    buffer = bucket.buffer()

    def ended(averaged: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        averaged.value()  # raises what the all-reduce ended with
        return buffer

    return average(values_of(buffer), state.group).then(ended)


def average(
    values: torch.Tensor, group: dist.ProcessGroup
) -> torch.futures.Future[list[torch.Tensor]]:
    """Average `values`, in place, through torch's own all-reduce; the future gives [values]."""
    values.div_(group.size())
    work = dist.all_reduce(values, group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future


# Not an attribute of the module: a copied module has its own reducer without a hook, so it must not
# inherit the state; and a saved module must not contain it.
_states: WeakKeyDictionary[DistributedDataParallel, HookState] = WeakKeyDictionary()


def hook_state(model: DistributedDataParallel) -> HookState:
    """The hook's state of `model`, registered on first use.

    Raises:
        ConfigError: as `check_module`; or `model` has another communication hook.
    """
    check_module(model)
    state = _states.get(model)
    if state is None:
        state = HookState(model)
        try:
            model.register_comm_hook(state, hook)
        except RuntimeError as error:
            raise ConfigError(
                f"this DDP module already has a communication hook ({error}): do not combine "
                "attach with register_comm_hook or DDP(mixed_precision=...)"
            ) from None
        finally:
            # DDP also stores the hook and its state in the module, for its Python reducer only.
            # There a copy or a checkpoint of the module would include the process group and locks.
            model._comm_hooks[:] = [e for e in model._comm_hooks if e[1] is not state]
        _states[model] = state
    return state
