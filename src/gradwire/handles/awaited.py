"""Tensors whose values are on their way: whoever touches one waits.

While its values are awaited, a tensor's object has a class whose `__torch_function__` calls what it
was given, and lets go of what asks for no value (its shape, or whether there is a gradient). So
functions of torch wait wherever they are called: in a forward, a checkpoint, an evaluation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

Tensor = torch.Tensor


class Awaited:
    """What awaited tensors have; `_arrive` lets their values arrive, and gives them their class."""

    __slots__ = ()
    _arrive: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _ASKS_NO_VALUE:
            for one in tree_leaves((args, kwargs)):
                arrive(one)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    # These make another of its class, or of its state, before they touch it.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        arrive(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        arrive(self)
        return self.__reduce_ex__(protocol)


class AwaitedParameter(Awaited, torch.nn.Parameter):
    """A parameter whose next value is awaited."""


class AwaitedTensor(Awaited, torch.Tensor):
    """A gradient whose average is awaited."""


_AWAITED: dict[type, type] = {torch.nn.Parameter: AwaitedParameter, torch.Tensor: AwaitedTensor}
_PLAIN = {awaited: plain for plain, awaited in _AWAITED.items()}


def can_be_awaited(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of one of torch's own classes."""
    return type(tensor) in _AWAITED


def withhold(tensor: torch.Tensor, arrives: Callable[[], None]) -> None:
    """Call `arrives` once the tensor is touched, which calls `release`, or raises."""
    tensor.__dict__["_arrive"] = arrives
    tensor.__class__ = _AWAITED[type(tensor)]


def release(tensor: torch.Tensor) -> None:
    """Give it its class back."""
    if isinstance(tensor, Awaited):
        del tensor.__dict__["_arrive"]
        tensor.__class__ = _PLAIN[type(tensor)]


def arrive(tensor: object) -> None:
    """Wait for a tensor, if it is awaited."""
    if isinstance(tensor, Awaited):
        tensor._arrive()


_GRAD: Any = Tensor.grad
_PROPERTIES = (
    *("device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_sparse"),
    *("itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape"),
)
_METHODS = (
    *("__hash__", "__len__", "dim", "element_size", "is_complex", "is_contiguous", "nelement"),
    *("is_floating_point", "numel", "register_hook", "register_post_accumulate_grad_hook", "size"),
    "stride",
)
_ASKS_NO_VALUE = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
        *(getattr(Tensor, name) for name in _METHODS),
        *(_GRAD.__set__, _GRAD.__delete__),
        *(torch.is_complex, torch.is_floating_point, torch.numel),
    ]
)
