"""Optimizers that step some of their parameters later than the others.

That changes nothing where an update is per parameter: computed from the parameter, its gradient and
its own state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from gradwire.errors import ConfigError

Optimizer = torch.optim.Optimizer

PER_PARAMETER = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def check_optimizer(optimizer: object) -> Optimizer:
    """The optimizer, if its parameters may step one after the other.

    Raises:
        ConfigError: it is none, or they may not; it says why, and what to write.
    """
    if not isinstance(optimizer, Optimizer):
        given = "give the" if optimizer is None else f"{type(optimizer).__name__} is no"
        raise ConfigError(
            f"attach: cross_barrier=True: {given} torch.optim.Optimizer of these parameters: "
            "optimizer=optimizer"
        )
    kind = type(optimizer)
    if kind not in PER_PARAMETER and not getattr(kind, "per_parameter", False):
        raise ConfigError(
            f"attach: cross_barrier=True: {kind.__name__} is not known to update each parameter by "
            "its own gradient and state alone, which may step at different times: leave "
            f"cross_barrier out; if it does, write per_parameter = True in class {kind.__name__}"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(
            f"attach: cross_barrier=True: {kind.__name__} has differentiable=True, whose steps are "
            "recorded by autograd: leave one of both out"
        )
    if hasattr(optimizer.step, "_torchdynamo_orig_callable"):
        raise ConfigError(
            f"attach: cross_barrier=True: {kind.__name__}.step is compiled, for all parameters at "
            "once: leave torch.compile of the optimizer, or cross_barrier, out"
        )
    return optimizer


class LateStep:
    """A step that the script has asked for, with the options of then: a schedule may change them
    before all parameters have stepped."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._options = [
            {name: _now(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._group = {
            p: number for number, g in enumerate(optimizer.param_groups) for p in g["params"]
        }

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._group

    def run(self, parameters: Iterable[torch.Tensor]) -> None:
        """LateStep these alone: the optimizer's own update, without the hooks of a step."""
        groups: list[dict[str, Any]] = [{**options, "params": []} for options in self._options]
        for parameter in parameters:
            groups[self._group[parameter]]["params"].append(parameter)
        optimizer, step = self._optimizer, type(self._optimizer).step
        if getattr(step, "hooked", False):  # by torch, as the optimizer was made
            step = step.__wrapped__  # type: ignore[attr-defined]
        every, optimizer.param_groups = optimizer.param_groups, [g for g in groups if g["params"]]
        hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        # Which a step of the base class would call.
        optimizer._optimizer_step_pre_hooks = OrderedDict()
        optimizer._optimizer_step_post_hooks = OrderedDict()
        try:
            with _by_itself({p.device.type for g in groups for p in g["params"]}):
                step(optimizer)
        finally:
            optimizer.param_groups = every
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks


@contextmanager
def _by_itself(devices: Iterable[str]) -> Iterator[None]:
    """As at a script's step(): whoever touches may be in an evaluation, autocast, a transform of
    torch.func, or a forward whose operations are recorded."""
    with ExitStack() as stack:
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.no_grad())
        yield


def _now(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
