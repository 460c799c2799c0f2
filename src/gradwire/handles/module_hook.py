"""A hook of a module's forward, for passes that will have a backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


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
