"""FSDP2's collectives as `bench train --sharded` counts them, casts what they send, or omits them.

Bytes sent per rank, by formula, since torch does not count:

    all-gather        (N-1) times the bytes of a rank's part
    reduce-scatter    (N-1)/N of the bytes of its input

at the width that is sent. gloo's reduce-scatter is an all-reduce inside and sends twice as much:
`link_bytes` has what really left the node, where a network is emulated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

WIDTHS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class _Allocates:
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class TorchGather(_Allocates, AllGather):
    """Torch's all-gather, of values cast to `width`.

    Attributes:
        wire_bytes: by the formula, so far.
    """

    def __init__(self, width: str) -> None:
        self.width = WIDTHS[width]
        self.wire_bytes = 0

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        own = input_tensor.to(self.width)
        self.wire_bytes += (group.size() - 1) * own.nbytes
        if own is input_tensor:
            work: dist.Work | None = dist.all_gather_into_tensor(
                output_tensor, own, group, async_op
            )
            return work
        whole = torch.empty(output_tensor.numel(), dtype=self.width)
        dist.all_gather_into_tensor(whole, own, group)
        output_tensor.copy_(whole)
        return None


class TorchScatter(_Allocates, ReduceScatter):
    """Torch's reduce-scatter, of values cast to `width`; 16-bit values are divided by the number of
    ranks before they are summed, as in DDP's hooks.

    Attributes:
        wire_bytes: by the formula, so far.
    """

    def __init__(self, width: str) -> None:
        self.width = WIDTHS[width]
        self.wire_bytes = 0

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        whole = input_tensor.to(self.width)
        self.wire_bytes += (group.size() - 1) * whole.nbytes // group.size()
        if whole is input_tensor:
            work: dist.Work | None = dist.reduce_scatter_tensor(
                output_tensor, whole, op, group, async_op
            )
            return work
        assert op == dist.ReduceOp.AVG
        whole.div_(group.size())
        own = torch.empty(output_tensor.numel(), dtype=self.width)
        dist.reduce_scatter_tensor(own, whole, dist.ReduceOp.SUM, group)
        output_tensor.copy_(own)
        return None


class NoGather(_Allocates, AllGather):
    """Puts a rank's own part in the place of every other's: a step without communication."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        output_tensor.view(group.size(), -1).copy_(input_tensor.clone())


class NoScatter(_Allocates, ReduceScatter):
    """Takes a rank's own gradient for the average."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
