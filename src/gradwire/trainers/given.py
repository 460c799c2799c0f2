"""Averages of gradients that something other than torch's autograd has computed.

DDP averages what a backward pass gives to parameters. So a stand-in module has a parameter per
gradient, of its name, shape and dtype, without memory of its own, and its backward gives each the
gradient that was handed over: DDP's hooks run, and with them all that `gw.attach` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.handles.wrapped import is_alone

Like = Mapping[str, tuple[Sequence[int], torch.dtype]]  # name -> shape and dtype of a gradient


def stand_in(like: Like, device: torch.device) -> torch.nn.Module:
    """What `gw.attach` takes for gradients on `device`, one or more: a DDP module over the default
    group; in a single process a plain one."""
    module = _StandIn(like, device)
    if is_alone():
        return module
    return DistributedDataParallel(module, init_sync=False, gradient_as_bucket_view=True)


def averages(model: torch.nn.Module, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The averages of gradients over all ranks, in order. Collective.

    Args:
        model: what `stand_in` returned, for several ranks.
        gradients: one for each parameter. They are only read, and copied once, into DDP's buckets,
            if nobody else holds the tensors; the list is emptied.

    Returns:
        Views of DDP's buckets: the next call overwrites them.
    """
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = None
    with torch.enable_grad():
        model(gradients).backward()
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


class _StandIn(torch.nn.Module):
    def __init__(self, like: Like, device: torch.device) -> None:
        super().__init__()
        for name, (shape, dtype) in like.items():
            value = torch.zeros((), dtype=dtype, device=device)
            one = all(length == 1 for length in shape)  # whose strides DDP compares with a bucket's
            value = value.reshape(tuple(shape)) if one else value.expand(tuple(shape))
            self._parameters[name] = torch.nn.Parameter(value)  # a name may have dots

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = _Given.apply(gradients, *self.parameters())  # type: ignore[no-untyped-call]
        return loss


class _Given(torch.autograd.Function):
    """A loss whose gradients are given."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()  # what autograd alone holds it does not copy
        return None, *gradients
