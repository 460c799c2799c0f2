"""A model whose layers have gradients of other sizes, under DDP or FSDP2, for tests of policies."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import gradwire as gw

OFTEN = gw.Replan(every=6, first=4, average=2, share=1.0)
MATRICES = ("0.weight", "2.weight", "4.weight")


class Scaled(nn.Linear):
    """A layer whose gradients are `scale` times as large as its neighbours'."""

    def __init__(self, wide: int, high: int, scale: float) -> None:
        super().__init__(wide, high)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight * self.scale - (self.scale - 1) * self.weight.detach()
        return nn.functional.linear(x, weight, self.bias)


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        Scaled(64, 128, 100.0), nn.ReLU(), Scaled(128, 256, 1.0), nn.ReLU(), Scaled(256, 64, 0.01)
    )
    if kind == "fsdp2":
        fully_shard(model, mesh=DeviceMesh.from_group(dist.new_group(), "cpu"))
        return model
    return nn.parallel.DistributedDataParallel(model, process_group=dist.new_group())


def steps(model: Any, first: int, last: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step in range(first, last):
        optimizer.zero_grad()
        made = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(16, 64, generator=made)).square().mean().backward()
        optimizer.step()


def until_decided(model: Any, handle: Any, count: int, version: int, pause: float = 0) -> None:
    """Train until so many decisions have been made on every rank, and a plan is in force."""
    for step in range(2000):
        steps(model, step, step + 1)
        seen = torch.tensor([len(handle.adaptation.history) - count, handle.plan.version - version])
        dist.all_reduce(seen, dist.ReduceOp.MIN)
        if seen.min() >= 0:
            return
        time.sleep(pause)
    raise AssertionError("no decision came")


def on_all(found: Any) -> list[Any]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    return parts
