"""A wrapped module's backward pass: what it waits for at its end; how it ends early."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

_NONE = -1  # what autograd calls the running backward where there is none


def running() -> int:
    """The number of the backward pass that the calling thread runs; -1: none."""
    return torch._C._current_graph_task_id()


class Backward:
    """The passes of one module.

    A pass of the user's may be several of autograd's (reentrant checkpointing, or a loss in parts):
    what was started in one is awaited at its end.

    Args:
        ended: called at the end of each of autograd's passes; it may raise.
        abandoned: called when one of them ends by an exception.
        forward: called when the module has run forward; it may raise.
        reduces: whether a backward of the module is one that peers take part in.
    """

    def __init__(
        self,
        ended: Callable[[], None],
        abandoned: Callable[[], None],
        forward: Callable[[], None],
        reduces: Callable[[torch.nn.Module], bool] = lambda ddp: bool(
            ddp.require_backward_grad_sync
        ),
    ) -> None:
        self.forward = forward
        self.reduces = reduces
        self._ended = ended
        self._abandoned = abandoned
        self._current = _NONE
        self._hook: Any = None

    def watch(self, model: torch.nn.Module) -> None:
        """Notice passes as they begin, at the outputs of `model`, before any bucket is ready."""
        self._hook = model.register_forward_hook(_AfterForward(self))

    def unwatch(self) -> None:
        """Notice no later pass."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def enter(self) -> bool:
        """Have the running pass of autograd call `ended` at its end; False: there is none."""
        current = running()
        if current not in (_NONE, self._current):
            # At the end of this pass, before DDP looks at the futures: it would turn an error of
            # ours into a RuntimeError without its name.
            Variable._execution_engine.queue_callback(_Guard(self._ended, self._abandoned))
        self._current = current
        return current != _NONE


class _AfterForward:
    """A module's forward hook; a copy of the module, or a saved one, gets one that does nothing."""

    def __init__(self, backward: Backward) -> None:
        self._backward = backward

    def __call__(self, module: torch.nn.Module, _: object, output: object) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self._backward.forward()
        if not self._backward.reduces(module):
            return  # within no_sync peers wait for nothing
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._begins)

    def _begins(self, _: torch.Tensor) -> None:
        self._backward.enter()

    def __reduce__(self) -> tuple[object, ...]:
        # A callable of the standard library that takes any arguments and returns None.
        return getattr, (nullcontext(), "__exit__")


class _Guard:
    """A callback of autograd's; a pass that ends by an exception lets go of it without a call."""

    def __init__(self, ended: Callable[[], None], abandoned: Callable[[], None]) -> None:
        self._ended = ended
        self._abandoned: Callable[[], None] | None = abandoned

    def __call__(self) -> None:
        self._abandoned = None
        self._ended()

    def __del__(self) -> None:
        if self._abandoned is not None and not sys.is_finalizing():
            self._abandoned()
