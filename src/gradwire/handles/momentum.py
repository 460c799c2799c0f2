"""Refuses optimisers that have momentum for parameters whose averages include momentum already.

A hook before every optimiser's step, for as long as a handle has such parameters, finds optimisers
made before or after `attach`. It compares a few numbers per step.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from gradwire.errors import ConfigError
from gradwire.planner import Plan


class MomentumGuard:
    """Watches the optimisers of one handle's parameters.

    Args:
        named: the parameters, by any of their names.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._named = named
        self._names: dict[torch.Tensor, str] = {}  # of parameters whose averages have momentum
        self._how: dict[str, str] = {}
        self._hook: Any = None
        # optimiser -> (sizes of its groups, a parameter's name per group or None)
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], list[str | None]]] = (
            weakref.WeakKeyDictionary()
        )

    def watch(self, plan: Plan) -> None:
        """Begin to watch, if this plan's averages have momentum; else end."""
        self._how = {
            p.name: str(p.inner) for p in plan.parameters if p.aggregator.replaces_momentum
        }
        self._names = {p: name for name, p in self._named if name in self._how}
        self._known.clear()
        if not self._names:
            self.unwatch()
        elif self._hook is None:
            here = weakref.ref(self)

            def before_step(optimizer: Optimizer, *_: object) -> None:
                guard = here()
                if guard is not None:
                    guard.check(optimizer)

            self._hook = register_optimizer_step_pre_hook(before_step)
            weakref.finalize(self, self._hook.remove)

    def unwatch(self) -> None:
        """End watching: nothing is left behind."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def check(self, optimizer: Optimizer) -> None:
        """Raise ConfigError if the optimiser has momentum for a watched parameter."""
        groups = optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        known = self._known.get(optimizer)
        if known is None or known[0] != sizes:
            held = [next(filter(None, map(self._names.get, g["params"])), None) for g in groups]
            known = self._known[optimizer] = sizes, held
        for group, name in zip(groups, known[1], strict=True):
            if name is not None:
                own = _own_momentum(group)
                if own is not None:
                    option, zero = own
                    raise ConfigError(
                        f"{type(optimizer).__name__} has {option} for parameter {name}, whose "
                        f"average, by {self._how[name]}, includes momentum already: make the "
                        f"optimizer with {zero}, or attach with momentum=0 ('dgc:momentum=0') to "
                        "leave momentum to the optimizer"
                    )


def _own_momentum(group: Mapping[str, Any]) -> tuple[str, str] | None:
    """(the option of a group that is momentum, what to write for none of it), or None."""
    momentum, betas, beta1 = (group.get(key) for key in ("momentum", "betas", "beta1"))
    if momentum:
        return f"momentum={float(momentum):g}", "momentum=0"
    if betas and betas[0]:
        rest = ", ".join(f"{float(beta):g}" for beta in betas[1:])
        return f"betas=({float(betas[0]):g}, {rest})", f"betas=(0.0, {rest})"
    if beta1:
        return f"beta1={float(beta1):g}", "beta1=None"
    return None
