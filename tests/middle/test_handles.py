"""A handle at world size 1: inspected, and detached after an exception in backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from ends import ends, finished
from gradwire.integrations.hook import hook_state
from stress.worlds import of_transport

pytestmark = pytest.mark.multiprocess


def step(model: nn.Module, rank: int) -> None:
    model(torch.full((4, 30), rank + 1.0)).square().mean().backward()


def looks_alone(rank: int) -> dict[str, Any]:
    model = DDP(nn.Linear(30, 20))
    handle = gw.attach(model)
    found = handle.stats() if rank == 0 else {}
    dist.barrier()
    step(model, rank)
    return found


def test_statistics_wait_for_nobody() -> None:
    found = ends(2, looks_alone, timeout=8)
    finished(found)
    assert found[0].value["steps"] == 0
    assert found[0].value["shared_bytes"] == 0


def detaches_after_its_own_exception(rank: int) -> bool:
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
    return hook_state(model).reducer is None


@pytest.mark.parametrize("shm", [False, True], ids=["gloo", "shm"])
def test_a_handle_can_be_detached_after_an_exception_in_backward(shm: bool) -> None:
    found = ends(2, detaches_after_its_own_exception, environment=of_transport(shm))
    finished(found)
    assert [end.value for end in found] == [True, True]
