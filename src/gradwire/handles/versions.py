"""Versions of the weights of a sharded module: they change when an optimizer has stepped.

The version counters of tensors do not tell it: torch's foreach optimizers change sharded parameters
without counting (seen with torch 2.13).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class Versions:
    """Counts the steps of optimizers that have one of the parameters, made before or after.

    Args:
        parameters: those that an optimizer has now. FSDP2 may replace them, and torch moves no
            module (`to_empty`) whose parameters have weak references.

    Attributes:
        steps: so far; 0 also if what trains the module is no torch Optimizer.
    """

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        self.steps = 0
        self._parameters = parameters
        here = weakref.ref(self)

        def stepped(optimizer: Optimizer, *_: Any) -> None:
            versions = here()
            if versions is not None and versions.has(optimizer):
                versions.steps += 1

        self._hook = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, self._hook.remove)

    def has(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has one of the parameters."""
        ours = {id(parameter) for parameter in self._parameters()}
        return any(id(p) in ours for group in optimizer.param_groups for p in group["params"])

    def unwatch(self) -> None:
        """End counting: nothing is left behind."""
        self._hook.remove()
