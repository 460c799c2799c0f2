"""The parameters that a DDP module synchronises, as listed by its reducer."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import ConfigError
from gradwire.handles.wrapped import plain_names


def synchronised(model: DistributedDataParallel) -> list[tuple[str, torch.Tensor]]:
    """Names and parameters in the module's order; a tied parameter comes with each of its names.
    Names are without what torch.compile and activation checkpointing add.

    DDP selects them when it wraps the module: a parameter frozen later stays in its bucket, one
    unfrozen later gets no bucket. So this asks the reducer, and ignores `requires_grad`.

    Raises:
        ConfigError: a parameter was removed from the module.
    """
    # The buckets have zeros in place of gradients; this memory is released at once.
    buckets = model.reducer._get_zeros_like_grad_buckets()
    kept = {p for bucket in buckets for p in bucket.parameters()}
    every = plain_names(model.module.named_parameters(remove_duplicate=False))
    named = [(name, p) for name, p in every if p in kept]
    gone = kept - {p for _, p in named}
    if gone:
        raise ConfigError(
            "DDP synchronises parameters that are no longer in the module, of shapes "
            f"{sorted(tuple(p.shape) for p in gone)}: wrap the module after changing it"
        )
    return named
