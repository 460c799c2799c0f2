"""Failures under the backend "gradwire": named errors on every survivor, in time (law 10)."""

from __future__ import annotations

import os
import signal
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from products import one_in
from ranks import as_processes, caught

pytestmark = pytest.mark.multiprocess

# A failure that only this timeout of the groups ends was not noticed: ranks hang by then.
TIMEOUT_S, DEADLINE_S = 100.0, 60.0

Report = tuple[str, int | None, str]


def reported(action: Any) -> Report:
    """Type, peer and text of the error that `action` raises."""
    error = caught(action)
    return type(error).__name__, getattr(error, "peer", None), str(error)


def processes(world_size: int, body: Any, *args: Any, **how: Any) -> list[Any]:
    return as_processes(
        world_size, body, *args, timeout=TIMEOUT_S, deadline=DEADLINE_S, backend="gradwire", **how
    )


def backward_after_death(rank: int, wrap: str, dying: int) -> Report:
    warnings.simplefilter("ignore")
    inner = nn.Sequential(nn.Linear(100, 500), nn.Linear(500, 100))
    model: nn.Module = inner
    if wrap == "fsdp2":
        mesh = dist.DeviceMesh.from_group(dist.group.WORLD, "cpu")
        # Weights stay unsharded after forward: the first failing collective is a gradient's.
        fully_shard(inner, mesh=mesh, reshard_after_forward=False)
    else:
        if wrap == "registered":
            gw.register(inner)
        model = DDP(inner)
    for _ in range(3):
        model(torch.randn(4, 100)).sum().backward()
    loss = model(torch.randn(4, 100)).sum()
    dist.barrier()
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    return reported(loss.backward)


@pytest.mark.parametrize("wrap", one_in(2, ["ddp", "registered", "fsdp2"]))
def test_backward_raises_the_error_by_its_name(wrap: str) -> None:
    reports = processes(3, backward_after_death, wrap, 1, expect_death=(1,))
    for rank in (0, 2):
        kind, peer, text = reports[rank]
        assert (kind, peer) == ("TransportError", 1), text


def passed_on_after_death(rank: int) -> Report:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return reported(lambda: dist.all_reduce(torch.ones(100_000)))


def test_what_passes_through_fails_as_gloo_does() -> None:
    kind, _, text = processes(2, passed_on_after_death, expect_death=(1,))[0]
    assert kind in ("RuntimeError", "DistBackendError"), text


@pytest.fixture
def blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_BLOB", "1")


def wait_with_a_timeout(rank: int) -> Report:
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
    report = reported(lambda: work.wait(timedelta(seconds=0.3 if rank == 0 else TIMEOUT_S)))
    if rank == 0:
        assert not work.is_completed()
        store.set("timed out", b"")
    assert work.wait()
    assert work.get_future().wait()[0].eq(dist.get_world_size()).all()
    return report


@pytest.mark.usefixtures("blobs")
def test_a_wait_honours_its_timeout() -> None:
    (kind, _, text), other = processes(2, wait_with_a_timeout)
    assert kind == "TransportError"
    assert "0.3 s" in text
    assert other[0] == "NoneType"


def destroyed_and_made_again(rank: int) -> list[float]:
    """Groups are made and destroyed over one store; their resources are released."""
    size = dist.get_world_size()
    how: dict[str, Any] = {"timeout": timedelta(seconds=30), "wait_for_workers": False}
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, **how) if rank == 0 else None
    port = [own.port if own else 0]
    dist.broadcast_object_list(port)
    store = own or dist.TCPStore("127.0.0.1", port[0], is_master=False, **how)
    dist.barrier()
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
    return gradients


def test_groups_come_and_go() -> None:
    """Equal names and numbers of calls give equal random numbers."""
    for sums in processes(2, destroyed_and_made_again):
        assert sums[0] == sums[1] == sums[2] != 0


def aborted(rank: int) -> Report:
    """Abort with a collective in flight: its waiters get an error and do not hang."""
    x = torch.zeros(100_000, requires_grad=True)
    works = []
    x.register_hook(lambda g: works.append(dist.all_reduce(g.clone(), async_op=True)))
    x.sum().backward()
    works.pop().wait()
    store = dist.distributed_c10d._get_default_store().clone()
    if rank == 1:  # late
        store.wait(["aborted"])
        return "late", None, ""
    x.sum().backward()
    dist.distributed_c10d._abort_process_group()
    report = reported(works.pop().wait)
    store.set("aborted", b"")
    return report


@pytest.mark.usefixtures("blobs")
def test_abort_ends_what_is_under_way() -> None:
    kind, _, text = processes(2, aborted)[0]
    assert kind == "TransportError", text
    assert "destroyed" in text


def test_a_wrong_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `init_process_group`; test_backend_settings.py has the errors of each variable."""
    monkeypatch.setenv("GRADWIRE_CODEC", "qsgdd")
    with pytest.raises(gw.ConfigError, match=r"GRADWIRE_CODEC.*unknown codec .*'qsgdd'"):
        dist.init_process_group("gradwire", rank=0, world_size=1, store=dist.HashStore())
