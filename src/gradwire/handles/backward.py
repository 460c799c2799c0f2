"""Callbacks at the end of a wrapped module's backward pass, and at an early end of it, or of its
forward, by an error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

_NONE = -1  # autograd's id outside a backward pass


def running() -> int:
    """The id of the backward pass that the calling thread runs; -1: none."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether the calling thread runs a backward pass: recomputation in it, too."""
    return running() != _NONE


class ModuleHook:
    """Calls `then(module, ...)` where autograd records and nothing is being compiled. Copies of the
    module, and saved modules, get a hook without effect.

    Args:
        records: whether forwards that autograd does not record are left out.
    """

    def __init__(self, then: Callable[..., None], records: bool = True) -> None:
        self._then, self._records = then, records

    def __call__(self, module: torch.nn.Module, *given: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() >= self._records:
            self._then(module, *given)

    def __reduce__(self) -> tuple[object, ...]:
        # A callable from the standard library that takes any arguments and returns None.
        return getattr, (nullcontext(), "__exit__")


class Backward:
    """The backward passes of one module.

    One pass of the user's may be several of autograd's (reentrant checkpointing, or several
    losses). Collectives started in one of autograd's passes are awaited at its end.

    Args:
        ended: called at the end of each of autograd's passes; it may raise.
        abandoned: called when one of them ends with an exception.
        forward: called after the module's forward; it may raise.
        reduces: whether a backward of the module reduces gradients with peers.
        begins: called as each of autograd's passes begins; it may raise.
    """

    def __init__(
        self,
        ended: Callable[[], None],
        abandoned: Callable[[], None],
        forward: Callable[[], None],
        reduces: Callable[[torch.nn.Module], bool] = lambda ddp: bool(
            ddp.require_backward_grad_sync
        ),
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        self.forward = forward
        self.reduces = reduces
        self.begins = begins
        self._ended = ended
        self._abandoned = abandoned
        self._current = _NONE
        self._hook: Any = None

    def watch(self, model: torch.nn.Module) -> None:
        """Detect the start of each pass, by hooks on the outputs of `model`."""
        self._hook = model.register_forward_hook(ModuleHook(self._after_forward))

    def unwatch(self) -> None:
        """Remove the hook; later passes are not detected."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _after_forward(self, module: torch.nn.Module, _: object, output: object) -> None:
        self.forward()
        if not self.reduces(module):
            return  # within no_sync peers do not wait for this rank
        for tensor in tree_leaves(output):
            # A parameter that is returned would keep the hook for ever; its gradient comes last.
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._begins)

    def _begins(self, _: torch.Tensor) -> None:
        self.enter()

    def enter(self) -> bool:
        """Make the running pass of autograd call `ended` at its end; False: no pass is running."""
        current = running()
        if current not in (_NONE, self._current):
            self.begins()
            # Runs before DDP checks its futures, which would turn an error into a RuntimeError.
            Variable._execution_engine.queue_callback(_Guard(self._ended, self._abandoned))
        self._current = current
        return current != _NONE


class Forward:
    """The forwards of one module that end with an exception, recorded by autograd or not.

    Args:
        failed: called then.
    """

    def __init__(self, model: torch.nn.Module, failed: Callable[[], None]) -> None:
        self._failed = failed
        self._returned = False
        self._hooks = [
            model.register_forward_hook(ModuleHook(self._returns, records=False)),
            model.register_forward_hook(ModuleHook(self._ends, records=False), always_call=True),
        ]

    def unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _returns(self, *_: object) -> None:
        self._returned = True

    def _ends(self, *_: object) -> None:
        returned, self._returned = self._returned, False
        if not returned:
            self._failed()


def _raise(error: Exception) -> None:
    raise error


class _Guard:
    """A callback for autograd. A pass that ends with an exception drops it without calling it; then
    `__del__` calls `abandoned`."""

    def __init__(self, ended: Callable[[], None], abandoned: Callable[[], None]) -> None:
        self._ended = ended
        self._abandoned: Callable[[], None] | None = abandoned

    def __call__(self) -> None:
        self._abandoned = None
        try:
            self._ended()
        except Exception as error:
            # After DDP has finished its pass: else its next forward would fail in an assertion.
            Variable._execution_engine.queue_callback(partial(_raise, error))

    def __del__(self) -> None:
        if self._abandoned is not None and not sys.is_finalizing():
            self._abandoned()
