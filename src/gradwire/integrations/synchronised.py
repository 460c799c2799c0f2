"""Which parameters a DDP module synchronises: those that its reducer keeps."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import ConfigError
from gradwire.integrations.wrapped import plain_names


def synchronised(model: DistributedDataParallel) -> list[tuple[str, torch.Tensor]]:
    """Names and parameters in the module's order; a tied parameter comes with each of its names.
    Names are without what torch.compile and activation checkpointing add.

    DDP settles them when it wraps the module: a parameter frozen later still has its place in a
    bucket, one that is unfrozen later gets none. So the reducer is asked, not `requires_grad`.

    Raises:
        ConfigError: sparse gradients, or a parameter that has left the module since.
    """
    try:
        # The buckets come with zeros in place of gradients: memory that goes at once.
        buckets = model.reducer._get_zeros_like_grad_buckets()
    except RuntimeError as error:
        raise ConfigError(
            "sparse gradients cannot be compressed, and DDP has no flat buckets for this module: "
            f"use nn.Embedding(sparse=False) ({error})"
        ) from error
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
