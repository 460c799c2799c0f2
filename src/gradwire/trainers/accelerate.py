"""`gw.accelerate`: attach to a model that Accelerate has prepared.

model, optimizer = accelerator.prepare(model, optimizer)
handle = gw.accelerate.attach(accelerator, model, "qsgd:bits=4")
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from gradwire.errors import ConfigError
from gradwire.handles.handle import Handle
from gradwire.trainers.state import Compression, Makes

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    raise ImportError(
        f'gw.accelerate needs Accelerate ({error}): pip install "gradwire[accelerate]"'
    ) from error

_registered: WeakKeyDictionary[Accelerator, list[_Registered]] = WeakKeyDictionary()


class _Registered(Compression):
    """One object of an Accelerator's checkpoints."""

    model: torch.nn.Module | None = None  # if the Accelerator knows it

    def free(self, accelerator: Accelerator) -> bool:
        """Whether another handle may take this one's place: it is detached, or the Accelerator has
        let go of its model (`free_memory`)."""
        if self.handle is None or not self.handle._reductions.installed:
            return True
        return self.model is not None and not _knows(accelerator, self.model)


def _knows(accelerator: Accelerator, model: torch.nn.Module) -> bool:
    inside = getattr(model, "module", model)  # of DDP: what it wraps is listed
    return any(one is model or one is inside for one in accelerator._models)


def attach(
    accelerator: Accelerator, model: torch.nn.Module, codec: Makes = "qsgd", **options: Any
) -> Handle:
    """`gw.attach`, with the state of all ranks in `accelerator.save_state` and `load_state`, which
    every rank calls. A checkpoint loads at any number of ranks. After `handle.detach()` or
    `accelerator.free_memory()` the next call takes that handle's place in checkpoints.

    Args:
        model: what `accelerator.prepare` returned.
        codec, options: as in `gw.attach`; or partial(gw.outer, every=100) and the optimizer.

    Raises:
        ConfigError: as `gw.attach`; or `accelerator` is no Accelerator.
    """
    if not isinstance(accelerator, Accelerator):
        said = "give the Accelerator first, then what its prepare(...) returned"
        raise ConfigError(f"gw.accelerate.attach: accelerator={accelerator!r:.60}: {said}")
    registered = _registered.setdefault(accelerator, [])
    # Else checkpoints would have one more.
    compression = next((one for one in registered if one.free(accelerator)), None)
    if compression is not None:
        compression.anew(codec, options)
    else:
        rank0_only = not accelerator.project_configuration.save_on_each_node
        compression = _Registered(codec, options, rank0_only=rank0_only)
    handle = compression.attach(model)
    compression.model = model if _knows(accelerator, model) else None
    if compression not in registered:
        accelerator.register_for_checkpointing(compression)
        registered.append(compression)
    return handle
