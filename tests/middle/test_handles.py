"""A handle at world size 1: inspected, and detached after an exception in backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from transports import over_both

import gradwire as gw
from rooms.handles import hook_state

pytestmark = [pytest.mark.multiprocess, *over_both(2)]


def step(model: nn.Module, rank: int) -> None:
    model(torch.full((4, 30), rank + 1.0)).square().mean().backward()


def test_statistics_wait_for_nobody(rank: int) -> None:
    model = DDP(nn.Linear(30, 20))
    handle = gw.attach(model)
    if rank == 0:
        found = handle.stats()
        assert found["steps"] == 0
        assert found["shared_bytes"] == 0
    dist.barrier()
    step(model, rank)


def test_it_can_be_detached_after_an_exception_in_backward(rank: int) -> None:
    layers = nn.Sequential(nn.Linear(30, 500), nn.Linear(500, 20))
    model = DDP(layers, bucket_cap_mb=0.01)
    handle = gw.attach(model, coalesce_bytes=0)
    for _ in range(3):
        step(model, rank)

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("this rank's own")

    if rank == 1:
        layers[0].weight.register_hook(fail)
    with pytest.raises((RuntimeError, gw.TransportError)):
        step(model, rank)
    handle.detach()
    assert hook_state(model).reducer is None
