"""Gradients that lie in DDP's buffers in another order than that of their values.

DDP gives a gradient the strides of its parameter: of a weight in channels_last, or of one that was
transposed, the buffer has the values in the order of memory. Matrices, chunks and states are of the
parameter's own order, so such a gradient is copied to it, and its average copied back.
"""

from __future__ import annotations

import torch


def as_in_memory(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor | None:
    """The gradient of `parameter` as a view of its part of a buffer, a real tensor of one
    dimension, where that part is not in the order of its values; else None. A complex gradient, of
    which the part has pairs, gets a last dimension of 2."""
    if parameter.is_contiguous():
        return None
    if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return None  # it has gaps, or overlaps: DDP's buffer is in order
    shape, strides = tuple(parameter.shape), parameter.stride()
    if parameter.is_complex():
        shape, strides = (*shape, 2), (*(2 * stride for stride in strides), 1)
    return part.as_strided(shape, strides, part.storage_offset())
