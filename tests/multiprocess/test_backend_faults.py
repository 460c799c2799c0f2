"""The backend "gradwire": waits with a timeout, groups that end, and a wrong environment.

tests/multiprocess/test_faults.py has ranks that fail under it.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from ranks import caught, on

over_blobs = on(2, backend="gradwire", timeout=100.0, environment={"GRADWIRE_BLOB": "1"})


@over_blobs
def test_wait_with_a_timeout(rank: int) -> None:
    """Rank 1 is late: a wait with a timeout fails, a wait without one succeeds."""
    x = torch.zeros(100_000, requires_grad=True)
    works = []

    def reduce(gradient: torch.Tensor) -> None:
        works.append(dist.all_reduce(gradient.clone(), async_op=True))

    x.register_hook(reduce)
    x.sum().backward()  # every rank's engine is made here
    works.pop().wait()
    store = dist.distributed_c10d._get_default_store().clone()
    if rank == 1:
        store.wait(["timed out"])
    x.sum().backward()
    work = works.pop()
    error = caught(lambda: work.wait(timedelta(seconds=0.3 if rank == 0 else 100)))
    if rank == 0:
        assert isinstance(error, gw.TransportError)
        assert "0.3 s" in str(error)
        assert not work.is_completed()
        store.set("timed out", b"")
    assert work.wait()
    assert work.get_future().wait()[0].eq(dist.get_world_size()).all()
    assert rank == 0 or error is None


@on(2, backend="gradwire")
def test_destroyed_and_made_again(rank: int) -> None:
    """Groups are made and destroyed over one store; their resources are released. Equal names and
    numbers of calls give equal random numbers."""
    size, store = dist.get_world_size(), dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    gradients = []
    for _ in range(3):
        dist.init_process_group("gradwire", rank=rank, world_size=size, store=store)
        torch.manual_seed(0)
        model = DDP(nn.Sequential(nn.Linear(100, 300), nn.Linear(300, 100)))
        model(torch.randn(4, 100)).square().sum().backward()
        gradients.append(float(sum(p.grad.double().sum() for p in model.parameters())))
        assert dist.group.WORLD.stats()["calls"] == 1
        del model
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()
    assert gradients[0] == gradients[1] == gradients[2] != 0


@over_blobs
def test_aborted(rank: int) -> None:
    """Abort with a collective in flight: its waiters get an error and do not hang."""
    x = torch.zeros(100_000, requires_grad=True)
    works = []
    x.register_hook(lambda g: works.append(dist.all_reduce(g.clone(), async_op=True)))
    x.sum().backward()
    works.pop().wait()
    store = dist.distributed_c10d._get_default_store().clone()
    if rank == 1:  # late
        store.wait(["aborted"])
        return
    x.sum().backward()
    dist.distributed_c10d._abort_process_group()
    error = caught(works.pop().wait)
    store.set("aborted", b"")
    assert isinstance(error, gw.TransportError)
    assert "destroyed" in str(error)


def test_a_wrong_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `init_process_group`; test_backend_settings.py has the errors of each variable."""
    monkeypatch.setenv("GRADWIRE_CODEC", "qsgdd")
    with pytest.raises(gw.ConfigError, match=r"GRADWIRE_CODEC.*unknown codec .*'qsgdd'"):
        dist.init_process_group("gradwire", rank=0, world_size=1, store=dist.HashStore())
