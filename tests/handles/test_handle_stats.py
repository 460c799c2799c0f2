"""`handle.stats()`: calls, and the seconds that communication adds to backward.

The seconds are bounded by sleeps whose place in the other rank's order is known: the bounds hold
however slow the machine is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from training import Acts, nothing

LATE_S = 0.3


def late() -> None:
    time.sleep(LATE_S)


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


def told(what: str) -> Callable[[], None]:
    """Tells rank 1 that rank 0 waits."""
    store = dist.distributed_c10d._get_default_store()
    return lambda: store.set(what, b"")


def late_once_told(what: str) -> Callable[[], None]:
    store = dist.distributed_c10d._get_default_store().clone()

    def act() -> None:
        store.wait([what])
        late()

    return act


def test_seconds_under_ddp(rank: int) -> None:
    bare = Acts()
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
    if rank == 0:
        buckets, settle, tell = handle._reductions, handle._reductions._settle, told("ddp waits")

        def spied() -> None:
            waits = SimpleNamespace(wait=lambda *_: tell() or True)
            buckets._pending.insert(0, SimpleNamespace(ended=waits, future=waits))
            settle()

        buckets._settle = spied
        waited, whole = exposed(handle, model)
        buckets._settle = settle
        assert LATE_S <= waited <= whole
    else:
        bare.behind = late_once_told("ddp waits")
        waited, whole = exposed(handle, model)
        assert waited <= whole - LATE_S
    # A pause of one's own is not exposed.
    bare.behind, bare.between = nothing, late
    waited, whole = exposed(handle, model)
    assert 0 < waited <= whole - LATE_S


def test_seconds_under_fsdp2(rank: int) -> None:
    model = Acts()
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
    if rank == 0:
        owner, tell = handle._reductions.owner, told("fsdp waits")
        ticket = owner.ticket

        def spied(version: int) -> Any:
            tell()
            return ticket(version)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, "ticket", spied)
            waited, whole = exposed(handle, model)
        assert LATE_S <= waited <= whole
    else:
        model.behind = late_once_told("fsdp waits")
        waited, whole = exposed(handle, model)
        assert waited <= whole - LATE_S


def test_each_round_is_a_call(rank: int) -> None:
    model = DDP(nn.Linear(40, 60))
    handle = gw.attach(model, "powersgd", rank=2)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(4, 40)).square().mean().backward()
    stats = handle.stats()
    # two rounds of one scope: P with the bias, and Q
    assert stats["calls"] == 2 * stats["steps"] == 6
