"""`handle.stats()`: calls, and the seconds that communication adds to backward."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from ranks import as_processes

LATE_S = 0.4


class SlowOnTheWayBack(torch.autograd.Function):
    """Takes some time in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], None


class Sleeps(nn.Module):
    """Two layers, with a pause behind and between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 300), nn.Linear(300, 300)
        self.behind = self.between = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = SlowOnTheWayBack.apply(self.first(x), self.between)
        return SlowOnTheWayBack.apply(self.second(x), self.behind)


def step(model: nn.Module) -> float:
    """Seconds of its backward."""
    model.zero_grad()
    loss = model(torch.ones(4, 20)).square().mean()
    dist.barrier()
    begun = time.perf_counter()
    loss.backward()
    return time.perf_counter() - begun


def exposed(handle: Any, model: nn.Module) -> tuple[float, float]:
    """Of a step: (exposed, whole backward)."""
    before = handle.stats()["exposed_seconds"]
    whole = step(model)
    return handle.stats()["exposed_seconds"] - before, whole


def ddp(rank: int) -> None:
    bare = Sleeps()
    model = DDP(bare, bucket_cap_mb=0.02)  # a bucket for each layer
    handle = gw.attach(model, bits=4, coalesce_bytes=0)
    assert handle.stats()["calls"] == handle.stats()["exposed_seconds"] == 0
    for _ in range(3):
        step(model)
    calls = handle.stats()["calls"]
    with model.no_sync():
        step(model)
    assert handle.stats()["calls"] == calls  # nothing was averaged
    step(model)
    stats = handle.stats()
    assert stats["calls"] == calls + 2
    assert stats["exposed_seconds"] > 0
    assert stats["kernel_seconds"] > 0

    # The other rank is late with all of its buckets: this one has computed all, and waits.
    bare.behind = LATE_S * (rank != 0)
    waited, whole = exposed(handle, model)
    if rank == 0:
        assert LATE_S * 0.6 < waited <= whole
    else:
        assert waited < whole - LATE_S * 0.9
    # Both pause between their layers: the second layer's average is hidden behind that.
    bare.behind, bare.between = 0.0, LATE_S
    waited, whole = exposed(handle, model)
    assert waited < LATE_S / 2 < LATE_S <= whole


def fsdp(rank: int) -> None:
    model = Sleeps()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.first, model.second, model):
        # else gathers of weights, which are torch's, would wait for the late rank
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    handle = gw.attach(model, bits=4)
    assert handle.stats()["steps"] == handle.stats()["calls"] == 0
    for _ in range(3):
        step(model)
    stats = handle.stats()
    assert (stats["steps"], stats["calls"]) == (3, 6)
    assert stats["exposed_seconds"] >= stats["seconds"] > 0
    model.behind = LATE_S * (rank != 0)
    waited, whole = exposed(handle, model)
    if rank == 0:
        assert LATE_S * 0.6 < waited <= whole
    else:
        assert waited < LATE_S * 0.6


@pytest.mark.multiprocess
@pytest.mark.parametrize("body", [ddp, fsdp])
def test_exposed_seconds_and_calls(body: Any) -> None:
    as_processes(2, body, timeout=30)


def two_rounds(rank: int) -> None:
    model = DDP(nn.Linear(40, 60))
    handle = gw.attach(model, "powersgd", rank=2)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(4, 40)).square().mean().backward()
    stats = handle.stats()
    # two rounds of one scope: P with the bias, and Q
    assert stats["calls"] == 2 * stats["steps"] == 6


@pytest.mark.multiprocess
def test_each_round_is_a_call() -> None:
    as_processes(2, two_rounds, timeout=30)
