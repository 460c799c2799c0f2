"""A model whose layers have gradients of other sizes, under DDP or FSDP2, for tests of policies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_model import replicated
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire as gw
from rooms.decide import Decider
from rooms.handles import Switch

OFTEN = gw.Replan(every=6, first=4, average=2, share=1.0)
FOUR = "qsgd:bits=4:block=1024"  # under DDP the kernels that FSDP2 has by default, too
MATRICES = ("0.weight", "2.weight", "4.weight")


class Scaled(nn.Linear):
    """A layer whose gradients are `scale` times as large as its neighbours'."""

    def __init__(self, wide: int, high: int, scale: float) -> None:
        super().__init__(wide, high)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight * self.scale - (self.scale - 1) * self.weight.detach()
        return nn.functional.linear(x, weight, self.bias)


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        Scaled(64, 128, 100.0), nn.ReLU(), Scaled(128, 256, 1.0), nn.ReLU(), Scaled(256, 64, 0.01)
    )


def meshed(shape: tuple[int, int]) -> Any:
    """Under FSDP2 on a mesh of its own, (replicas, shards)."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    return fully_shard(layers(), mesh=mesh)


def model_of(kind: str, group: Any = None) -> Any:
    """Under "ddp" or "fsdp2", in a group of its own unless given; or "hsdp", two replicas."""
    model = layers()
    if kind == "hsdp":
        return fully_shard(model, mesh=replicated(2))
    group = group or dist.new_group()
    if kind == "fsdp2":
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
        return model
    return nn.parallel.DistributedDataParallel(model, process_group=group)


def steps(model: Any, first: int, last: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step in range(first, last):
        optimizer.zero_grad()
        made = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(16, 64, generator=made)).square().mean().backward()
        optimizer.step()


def until_decided(model: Any, handle: Any, count: int, version: int) -> None:
    """Train until so many decisions have been made on every rank, and a plan is in force. After
    each pass, wait for the decision that it began."""
    for step in range(200):
        steps(model, step, step + 1)
        handle._reductions.runner.wait()
        seen = torch.tensor([len(handle.adaptation.history) - count, handle.plan.version - version])
        dist.all_reduce(seen, dist.ReduceOp.MIN)
        if seen.min() >= 0:
            return
    raise AssertionError("no decision came")


@contextlib.contextmanager
def held(before: Callable[[], Any] = int, after: Callable[[], Any] = int) -> Iterator[None]:
    """In the background this rank calls `before` before it makes tables, and `after` once it has
    prepared a plan, of which its switch does not know yet."""
    make, prepare = Decider._tables, Switch._prepare

    def held_tables(self: Any, window: Any) -> Any:
        before()
        return make(self, window)

    def held_prepare(self: Any, plan: Any) -> None:
        prepare(self, plan)
        after()

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(Decider, "_tables", held_tables)
        monkey.setattr(Switch, "_prepare", held_prepare)
        yield


def methods(handle: Any) -> dict[str, str]:
    """Those in force, by parameter."""
    return {p.name: str(p.inner) for p in handle.plan.parameters}
