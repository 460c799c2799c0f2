"""Mistakes that DDP takes in silence: a warning, once for each handle, that names the parameter or
the call. And what `attach` refuses, if it comes later: an error.

DDP fixes what it synchronises, and in which dtype, when it wraps a module, and it synchronises only
what its own forward has begun. It trains on without a word, each rank by itself, where a script
unfreezes or adds a parameter later, or calls `ddp.module(x)`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import ConfigError
from gradwire.groups import check_fixed
from gradwire.handles.backward import ModuleHook
from gradwire.handles.wrapped import plain_name, plain_names


class Oversights:
    """Looks for them at the 1st, 2nd, 4th, 8th ... forward, so that many parameters cost nothing.

    Args:
        named: the parameters that DDP synchronises.
    """

    def __init__(
        self, model: DistributedDataParallel, named: Sequence[tuple[str, torch.Tensor]]
    ) -> None:
        self._dtypes = {p: p.dtype for _, p in named}
        self._ignored = frozenset(model.parameters_to_ignore)
        self._forwards = 0
        self._said = False
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(ModuleHook(self._look)),
            model.module.register_forward_pre_hook(ModuleHook(self._look_within)),
        ]

    def unwatch(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()

    def _look(self, ddp: DistributedDataParallel, *_: object) -> None:
        """Called before each forward of the DDP module."""
        self._forwards += 1
        if any("_in_backward_optimizers" in p.__dict__ for p in self._dtypes):
            check_module(ddp)  # else it would step with this rank's gradients alone
        if self._forwards & (self._forwards - 1):
            return
        check_module(ddp)
        if self._said:
            return
        inner: Any = ddp.module
        named = [(n, p) for n, p in inner.named_parameters() if n not in self._ignored]
        for name, p in plain_names(named):
            dtype = self._dtypes.get(p)
            if dtype is None and p.requires_grad:
                self._say(
                    f"parameter {name} requires a gradient, but did not when DDP wrapped the "
                    "module, so each rank trains it alone: wrap the module after unfreezing or "
                    "adding parameters"
                )
            elif dtype not in (None, p.dtype):
                self._say(
                    f"parameter {name} is of {p.dtype} now, and DDP averages its gradients in "
                    f"{dtype}, as when it wrapped the module: convert the module before wrapping it"
                )

    def _look_within(self, module: torch.nn.Module, *_: object) -> None:
        """Called before each forward of the wrapped module."""
        if DistributedDataParallel._active_ddp_module is None:
            self._say(
                f"the {type(module).__name__} inside a DDP module was called by itself, so its "
                "gradients are not averaged: call the DDP module, ddp(x), not ddp.module(x)"
            )

    def _say(self, message: str) -> None:
        """Warn, unless this handle has."""
        if not self._said:
            self._said = True
            warnings.warn(message, stacklevel=2)


# ---- what cannot have a handle

_SPARSE = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def check_module(model: DistributedDataParallel) -> None:
    """Raise ConfigError for a DDP module if not its buckets alone carry its gradients."""
    check_fixed(model.process_group)
    if getattr(model, "_use_python_reducer", False):
        raise ConfigError(
            "this DDP module was made under torch._dynamo.config.optimize_ddp='python_reducer', "
            "which has no buckets: set it to another value before wrapping the module"
        )
    reason = next(_reasons(model), None)
    if reason is not None:
        raise ConfigError(reason)


def _reasons(model: DistributedDataParallel) -> Iterator[str]:
    names = {p: plain_name(name) for name, p in model.module.named_parameters()}
    for p in model._delay_all_reduce_params:
        yield (
            f"parameter {names[p]} is in delay_all_reduce_named_params, so DDP averages it beside "
            "its buckets: wrap the module without that argument"
        )
    managed = {p for p in model._module_parameters if p.requires_grad}
    for p, name in names.items():
        if p in managed and hasattr(p, "_in_backward_optimizers"):
            yield (
                f"parameter {name} has an optimizer that runs in backward "
                "(_apply_optimizer_in_backward), for which DDP needs its only communication hook: "
                "step an optimizer after backward"
            )
    for module in model.module.modules():
        if isinstance(module, _SPARSE) and module.sparse and module.weight in managed:
            yield (
                f"parameter {names[module.weight]} has sparse gradients, which lie in no flat "
                f"bucket: use nn.{type(module).__name__}(sparse=False)"
            )
