"""`gw.accelerate`: attach to a model that Accelerate has prepared.

model, optimizer = accelerator.prepare(model, optimizer)
handle = gw.accelerate.attach(accelerator, model, "qsgd:bits=4")
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from gradwire.aggregators.registry import Method
from gradwire.errors import ConfigError
from gradwire.integrations.handle import Handle
from gradwire.integrations.trainers.state import Compression

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    raise ImportError(
        f'gw.accelerate needs Accelerate ({error}): pip install "gradwire[accelerate]"'
    ) from error

_registered: WeakKeyDictionary[Accelerator, list[Compression]] = WeakKeyDictionary()


def attach(
    accelerator: Accelerator, model: torch.nn.Module, codec: Method = "qsgd", **options: Any
) -> Handle:
    """`gw.attach`, with the state of all ranks in `accelerator.save_state` and `load_state`, which
    every rank calls. A checkpoint loads at any number of ranks. After `handle.detach()` the next
    call takes that handle's place in checkpoints.

    Args:
        model: what `accelerator.prepare` returned.
        codec, options: as in `gw.attach`.

    Raises:
        ConfigError: as `gw.attach`; or `accelerator` is no Accelerator.
    """
    if not isinstance(accelerator, Accelerator):
        raise ConfigError(
            f"gw.accelerate.attach: accelerator={accelerator!r:.60}: give the Accelerator first, "
            "then what its prepare(...) returned"
        )
    registered = _registered.setdefault(accelerator, [])
    for one in registered:
        if one.handle is None or not one.handle.attached:  # else checkpoints would have one more
            one.anew(codec, options)
            return one.attach(model)
    rank0_only = not accelerator.project_configuration.save_on_each_node
    compression = Compression(codec, options, rank0_only=rank0_only)
    handle = compression.attach(model)
    accelerator.register_for_checkpointing(compression)
    registered.append(compression)
    return handle
