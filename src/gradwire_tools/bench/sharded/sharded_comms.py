"""FSDP2's collectives as `bench train --sharded` counts them, casts what they send, or omits them.

Bytes sent per rank, by formula, since torch does not count:

    all-gather        (N-1) times the bytes of a rank's part
    reduce-scatter    (N-1)/N of the bytes of its input

at the width that is sent. gloo's reduce-scatter is an all-reduce inside and sends twice as much:
`link_bytes` has what really left the node, where a network is emulated.

`truncate:w=R:g=R` is fake compression, a bound on what compressing this traffic could pay (THESIS
C.2, Fig. C.1): a codec of that ratio that takes no time. The rest arrives as zeros, so that ranks
agree and nothing diverges, but what is trained is not the model.
"""

from __future__ import annotations

import math
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


def kept(numel: int, ratio: float) -> int:
    """How many of `numel` values are sent: at least one, if there are any."""
    return math.ceil(numel / ratio)


class TorchGather(_Allocates, AllGather):
    """Torch's all-gather of the first 1/`ratio` of each rank's part, of values cast to `width`.

    Attributes:
        sends: if not, a rank's own part takes the place of every other's.
        wire_bytes: by the formula, so far.
    """

    def __init__(self, width: str = "fp32", ratio: float = 1, sends: bool = True) -> None:
        self.width, self.ratio, self.sends = WIDTHS[width], ratio, sends
        self.wire_bytes = 0

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not self.sends:
            output_tensor.view(group.size(), -1).copy_(input_tensor.clone())
            return None
        own = input_tensor[: kept(input_tensor.numel(), self.ratio)].to(self.width)
        self.wire_bytes += (group.size() - 1) * own.nbytes
        if own.dtype == input_tensor.dtype and own.numel() == input_tensor.numel():
            work: dist.Work | None = dist.all_gather_into_tensor(
                output_tensor, own, group, async_op
            )
            return work
        every = own.new_empty(group.size(), own.numel())
        dist.all_gather_into_tensor(every.view(-1), own, group)
        parts = output_tensor.view(group.size(), -1)
        parts[:, own.numel() :].zero_()
        parts[:, : own.numel()].copy_(every)
        return None


class TorchScatter(_Allocates, ReduceScatter):
    """Torch's reduce-scatter of the first 1/`ratio` of each rank's part, of values cast to `width`;
    16-bit values are divided by the number of ranks before they are summed, as in DDP's hooks.

    Attributes:
        sends: if not, a rank's own gradient is taken for the average.
        wire_bytes: by the formula, so far.
    """

    def __init__(self, width: str = "fp32", ratio: float = 1, sends: bool = True) -> None:
        self.width, self.ratio, self.sends = WIDTHS[width], ratio, sends
        self.wire_bytes = 0

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not self.sends:
            output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
            return None
        count = kept(output_tensor.numel(), self.ratio)
        every = input_tensor.view(group.size(), -1)[:, :count].to(self.width).contiguous()
        self.wire_bytes += (group.size() - 1) * every.nbytes // group.size()
        cast = every.dtype != input_tensor.dtype
        if not cast and count == output_tensor.numel():
            work: dist.Work | None = dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op, group, async_op
            )
            return work
        if cast:
            assert op == dist.ReduceOp.AVG
            every.div_(group.size())
            op = dist.ReduceOp.SUM
        own = every.new_empty(count)
        dist.reduce_scatter_tensor(own, every.view(-1), op, group)
        output_tensor[count:].zero_()
        output_tensor[:count].copy_(own)
        return None
