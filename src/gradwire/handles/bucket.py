"""A bucket of DDP: what it holds in every pass, and one of them in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gradwire.aggregators import Attached
from gradwire.handles.coalescing import Split


@dataclass
class Content:
    """The constant contents of a bucket: not its gradients, whose memory may be replaced.

    Attributes:
        lengths: number of values of each parameter in the buffer, in order.
        dtype, device: of the buffer; complex gradients are pairs of values.
        split: the parameters by scope, under the plan in force.
        nbytes: of the buffer.
    """

    parameters: list[torch.Tensor]
    members: list[Attached]
    lengths: list[int]
    dtype: torch.dtype
    device: torch.device
    split: Split

    def __post_init__(self) -> None:
        self.nbytes = self.dtype.itemsize * sum(self.lengths)


@dataclass(eq=False)
class Bucket:
    """A bucket in flight.

    Attributes:
        buffer: its values; complex ones as pairs.
        result: DDP's own tensor, which shares the memory.
        ready: time.perf_counter when DDP submitted it.
        ended, finished: set once `future` has its result, and when.
        left, unstarted: number of its scopes that have not ended, or not started.
        crosses: whether DDP has it back before its average is there, under cross_barrier.
    """

    buffer: torch.Tensor
    result: torch.Tensor
    content: Content
    future: torch.futures.Future[torch.Tensor]
    ready: float = field(default_factory=time.perf_counter)
    left: int = 0
    unstarted: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    finished: float = 0.0
    crosses: bool = False

    def __post_init__(self) -> None:
        self.left = self.unstarted = bool(self.content.split.bucket) + bool(
            self.content.split.model
        )

    def views(self) -> list[torch.Tensor]:
        """Each parameter's part of the buffer, of its shape and strides; of real values."""
        found = []
        parts = self.buffer.split(self.content.lengths)
        for parameter, part in zip(self.content.parameters, parts, strict=True):
            view = as_in_memory(parameter, part)
            found.append(part.view(parameter.shape) if view is None else view)
        return found

    def end(self) -> None:
        """Give DDP the result."""
        self.finished = time.perf_counter()
        self.future.set_result(self.result)
        self.ended.set()


def lengths_in(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[int]:
    """The number of values of each gradient in the bucket: two per complex value, while
    `GradBucket.gradients` counts one."""
    lengths = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
    assert sum(lengths) == buffer.numel(), f"a bucket of {buffer.numel()} values for {lengths}"
    return lengths


def as_in_memory(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor | None:
    """The gradient of `parameter` as a view of its part of a buffer, a real tensor of one
    dimension, where that part is not in the order of its values; else None. A complex gradient, of
    which the part has pairs, gets a last dimension of 2.

    DDP gives a gradient the strides of its parameter: of a weight in channels_last, or of one that
    was transposed. Matrices, chunks and states are of the parameter's own order, so such a gradient
    is copied to it, and its average copied back.
    """
    if parameter.is_contiguous():
        return None
    if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return None  # it has gaps, or overlaps: DDP's buffer is in order
    shape, strides = tuple(parameter.shape), parameter.stride()
    if parameter.is_complex():
        shape, strides = (*shape, 2), (*(2 * stride for stride in strides), 1)
    return part.as_strided(shape, strides, part.storage_offset())
