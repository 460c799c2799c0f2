"""A checkpoint in memory: training tries something for some steps, and goes back bit for bit.

What is kept: the module's parameters, their gradients and its buffers; the state of the optimizer,
of gradwire's handle, and of whatever else the user names (a sampler, a learning rate schedule, a
GradScaler); and the state of the random generators of torch, numpy and Python.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from gradwire.errors import ConfigError
from gradwire.state.state import Saved


class Stateful(Protocol):
    """What has state to keep: an optimizer, a sampler, a learning rate schedule."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class MemoryCheckpoint:
    """This rank's training as it is now, between two steps; all ranks take and restore it at the
    same steps. It holds a copy of all that it keeps, on the tensors' own devices.

    Args:
        handle: of gradwire, for residuals and counters of random numbers.
        model: the module that is trained.
        optimizer: its optimizer.
        stateful: the rest of what training changes: above all the position in the data.

    Raises:
        ConfigError: an element of `stateful` has no state_dict and load_state_dict.
    """

    def __init__(
        self,
        handle: Saved,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        stateful: Sequence[Stateful] = (),
    ) -> None:
        check_stateful(stateful)
        self._handle, self._model = handle, model
        self._states: list[tuple[Stateful, Any]] = [
            (one, copy.deepcopy(one.state_dict())) for one in (optimizer, *stateful)
        ]
        self._handles_state = handle.state_dict()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._gradients = {
            name: None if p.grad is None else p.grad.detach().clone()
            for name, p in model.named_parameters()
        }
        self._random = torch.get_rng_state(), np.random.get_state(), random.getstate()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Go back; it can be done more than once. Residuals go to the plan in force, whose state
        must have the same form, as that of another density has.

        Raises:
            ConfigError: the plan in force has other state; nothing is changed then.
        """
        facts = {p.name: p.facts() for p in self._handle.plan.parameters}
        self._handle.load_state_dict({**self._handles_state, "parameters": facts})
        model = self._model
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                tensor.copy_(self._tensors[name])
        for name, parameter in model.named_parameters():
            _put(parameter, self._gradients[name])
        for one, state in self._states:
            one.load_state_dict(copy.deepcopy(state))
        torch.set_rng_state(self._random[0])
        np.random.set_state(self._random[1])
        random.setstate(self._random[2])
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


def check_stateful(stateful: Sequence[object]) -> None:
    """Raise ConfigError unless all can save and load their state."""
    for one in stateful:
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(one, method, None)):
                raise ConfigError(
                    f"stateful: {one!r:.60} has no {method}: give objects that save and load "
                    "their state, such as a sampler or a learning rate schedule"
                )


def _put(parameter: nn.Parameter, kept: torch.Tensor | None) -> None:
    """The gradient as it was; in place where there is one, since DDP's may be parts of a bucket."""
    if kept is None or parameter.grad is None:
        parameter.grad = None if kept is None else kept.clone()
    else:
        parameter.grad.copy_(kept)
