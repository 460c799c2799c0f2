"""`truncate:w=R:g=R`: fake compression, a bound on what compressing FSDP2's traffic could pay
(THESIS C.2, Fig. C.1).

Only the first 1/R of each rank's part of a buffer is sent, uncompressed, in fp32: a codec of that
ratio that takes no time. The rest arrives as zeros, so that ranks agree and nothing diverges, but
what is trained is not the model.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from gradwire.bench.sharded_comms import TorchGather, TorchScatter


def kept(numel: int, ratio: float) -> int:
    """How many of `numel` values are sent: at least one, if there are any."""
    return math.ceil(numel / ratio)


class TruncatedGather(TorchGather):
    """Torch's all-gather of the first 1/`ratio` of each rank's part."""

    def __init__(self, ratio: float) -> None:
        super().__init__("fp32")
        self.ratio = ratio

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        own = input_tensor[: kept(input_tensor.numel(), self.ratio)]
        if own.numel() == input_tensor.numel():
            return super().__call__(output_tensor, input_tensor, group, async_op)
        self.wire_bytes += (group.size() - 1) * own.nbytes
        first = own.new_empty(group.size(), own.numel())
        dist.all_gather_into_tensor(first.view(-1), own.contiguous(), group)
        parts = output_tensor.view(group.size(), -1)
        parts[:, own.numel() :].zero_()
        parts[:, : own.numel()].copy_(first)
        return None


class TruncatedScatter(TorchScatter):
    """Torch's reduce-scatter of the first 1/`ratio` of each rank's part."""

    def __init__(self, ratio: float) -> None:
        super().__init__("fp32")
        self.ratio = ratio

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        count = kept(output_tensor.numel(), self.ratio)
        if count == output_tensor.numel():
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        first = input_tensor.view(group.size(), -1)[:, :count].contiguous().view(-1)
        self.wire_bytes += (group.size() - 1) * first.nbytes // group.size()
        output_tensor.zero_()
        own = first.new_empty(count)
        dist.reduce_scatter_tensor(own, first, op, group)
        output_tensor[:count].copy_(own)
        return None
