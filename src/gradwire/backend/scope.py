"""Detects collectives of a backward pass, which may carry gradients.

A process group does not know what a tensor is. But DDP reduces its buckets, and FSDP its shards,
from hooks on autograd's thread; metrics, losses, buffers and clipping norms are reduced outside of
it.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.collectives.legal import FLOATS
from gradwire.handles import backward
from gradwire.lang import gpu


def in_backward() -> bool:
    """Whether the caller runs in a backward pass, but not in a recomputed forward.

    Activation checkpointing recomputes forwards, and double backward builds a graph, both with
    gradients enabled. Their collectives must repeat their earlier results, so they stay
    uncompressed.
    """
    return backward.in_backward() and not torch.is_grad_enabled()


# With `model.join()`, a rank that ran out of data calls this to mirror the others' buckets.
_mirror = getattr(DistributedDataParallel, "_match_all_reduce_for_bwd_pass", None)


def mirrors_backward() -> bool:
    """Whether the caller mirrors the others' backward pass; only the call stack shows that."""
    frame = sys._getframe()
    while frame is not None and _mirror is not None:
        if frame.f_code is _mirror.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def reduction(op: object) -> str | None:
    """ "avg" or "sum"; None for other reductions."""
    return next(
        (name for name in ("sum", "avg") if op == getattr(dist.ReduceOp, name.upper())), None
    )


def lacking(device_type: str) -> str | None:
    """Why tensors on such devices cannot be compressed, or None."""
    if device_type == "cpu":
        return None
    if device_type != "cuda":
        return "gradwire has kernels for the CPU and for CUDA"
    reason = gpu.missing()
    return "TRITON_INTERPRET=1 is set" if reason is None and gpu.interpreting() else reason


def is_float(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided, and fp32, fp16 or bf16."""
    return tensor.layout == torch.strided and tensor.dtype in FLOATS
