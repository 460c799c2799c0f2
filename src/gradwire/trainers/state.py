"""What a trainer's checkpoint holds of gradwire: the state of all ranks, from rank 0's file.

Trainers ask objects for a `state_dict()` on every rank, write what rank 0 gave, and give that to
every rank's `load_state_dict`; some do so before they have wrapped the model. A handle's own
`state_dict` is that of its rank, so the residuals of all other ranks would be lost.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradwire.aggregators.registry import Method
from gradwire.errors import ConfigError
from gradwire.handles.attach import attach
from gradwire.handles.handle import Handle
from gradwire.handles.wrapped import only_inside

FILE = "gradwire.pt"  # in a checkpoint's folder
Makes = Method | Callable[..., Handle]  # of `gw.attach`; or partial(gw.outer, every=100)


def warn_of_none(path: str) -> None:
    """Warn of a checkpoint, or a file, without gradwire's state."""
    warnings.warn(f"{path}: nothing of gradwire is there: residuals start at zero", stacklevel=3)


def write(state: Mapping[str, Any], path: str) -> None:
    """A reader finds the whole file, or none."""
    torch.save(state, f"{path}.part")
    os.replace(f"{path}.part", path)


def read(path: str) -> dict[str, Any]:
    """What `write` wrote; {} and a warning without the file. It is mapped: each rank reads its
    own part alone.

    Raises:
        ConfigError: another program's file.
    """
    if not os.path.exists(path):
        warn_of_none(path)
        return {}
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"{path}: not a file that gradwire wrote, or a damaged one: give the path of one that "
            f"has the state of all ranks ({str(error).splitlines()[0]:.80})"
        ) from None
    return dict(found)


class Compression:
    """The arguments of `gw.attach`, and the handle once the trainer has wrapped the model.

    Args:
        codec, options: of `gw.attach`; or what makes a handle of `gw.outer`, of which each replica
            has checkpoints of its own.
        handle: of a module that is attached already.
        rank0_only: only rank 0 needs the state; else every rank gets that of all ranks.
    """

    def __init__(
        self,
        codec: Makes = "qsgd",
        options: Mapping[str, Any] | None = None,
        handle: Handle | None = None,
        rank0_only: bool = True,
    ) -> None:
        self._codec = codec
        self._options = dict(options or {})
        self._rank0_only = rank0_only
        self._loaded: Mapping[str, Any] = {}  # until there is a handle
        self.handle = handle
        if handle is not None:
            _check_whole(handle)

    def begin(self) -> None:
        """Forget the handle and the state of a run before; that run may have ended in an error."""
        self.detach()
        self.handle, self._loaded = None, {}

    def anew(self, codec: Makes, options: Mapping[str, Any]) -> None:
        """Take other arguments; what the trainer's checkpoints have is this object's still."""
        self.begin()
        self._codec, self._options = codec, dict(options)

    def attach(self, model: torch.nn.Module, optimizer: Any = None) -> Handle:
        """Attach to what the trainer has wrapped, and load the state that came before.

        Raises:
            ConfigError: as `gw.attach` and `Handle.load_state_dict`; or the handles of other ranks
                are of another part of the model.
        """
        if callable(self._codec):  # makes all replicas begin alike; a checkpoint has each one's own
            own = [p.detach().clone() for p in model.parameters()]
            optimizer = self._options.pop("optimizer", optimizer)
            optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's is around it
            made = self._codec(model, optimizer, **self._options)
            for p, values in zip(model.parameters(), own if self._loaded else (), strict=False):
                p.data.copy_(values)
        else:
            made = attach(only_inside(model), self._codec, **self._options)
        try:
            _check_whole(made)
            if self._loaded:
                made.load_state_dict(self._loaded)
        except ConfigError:
            made.detach()
            raise
        self.handle, self._loaded = made, {}
        return made

    def detach(self) -> None:
        """Statistics and state stay readable."""
        if self.handle is not None:
            self.handle.detach()

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks on rank 0, {} on others. Collective: every rank calls it."""
        if self.handle is None:
            return dict(self._loaded)
        if callable(self._codec):
            return self.handle._own_state()
        return self.handle.full_state_dict(self._rank0_only)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave on rank 0; without a handle when there is one."""
        if not state:  # of a single process, which owes nothing
            return
        if self.handle is None:
            self._loaded = state
        else:
            self.handle.load_state_dict(state)


def _check_whole(handle: Handle) -> None:
    """Raise ConfigError where rank 0's handle does not reach all ranks of the job."""
    if handle.world_size > 1 and handle._part() is not None:
        raise ConfigError(
            "a trainer's checkpoint takes the state of one handle over all ranks, and here each "
            "part of the model (tensor parallelism) has one of its own: use gw.attach alone, and "
            "save handle.checkpoint() on every rank"
        )
