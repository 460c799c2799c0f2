"""Collectives in stream order between processes, over gloo without tags.

In every process there are two groups of all ranks; one is taken for NCCL's. What it does must be,
bit by bit, what the other does with tags and three queues. tests/multiprocess/test_faults.py has
ranks that fail.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from gradwire import groups
from gradwire.engine import Communicator
from ranks import caught, on
from rooms.collectives import prepared
from training import alike, flat, mlp, train

OPTIONS = [
    gw.Options(segments=3),
    gw.Options(algorithm="ring", segments=2),
    gw.Options(algorithm="tree", segments=2),
    gw.Options(algorithm="parameter_server", partitions=3),
    gw.Options(algorithm="all_gather", segments=2),
    gw.Options(algorithm="hierarchical"),
    gw.Options(coordinated=True, segments=3),
]
CODECS = ("qsgd", "identity", "topk")


def two_groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """New ones of all ranks; the first is treated from now on as one that keeps order."""
    group, other = dist.new_group(), dist.new_group()
    groups.keeps_order = lambda asked, device: asked is group
    return group, other


@on(3, False)
@on((2, 3, 4), True, exhaustive=True)
def test_collectives_have_the_bits_of_those_with_tags(rank: int, every: bool) -> None:
    """Each option with one codec, or with every codec."""
    n, (ordered, other) = dist.get_world_size(), two_groups()
    torch.manual_seed(rank)
    values = torch.randn(n * 10_001)

    def all_reduce(group: Any, codec: str, options: gw.Options) -> list[torch.Tensor]:
        mine, residual = values.clone(), torch.zeros_like(values)
        for step in range(2):
            gw.all_reduce(
                mine, codec, op="avg", group=group, residual=residual, step=step, options=options
            )
        return [mine, residual]

    def halves(group: Any) -> list[torch.Tensor]:
        shard, whole = torch.empty(10_001), torch.empty_like(values)
        gw.reduce_scatter(shard, values, group=group)
        gw.all_gather(whole, shard, group=group)
        return [shard, whole]

    def equal(act: Any) -> bool:
        return all(map(torch.equal, act(ordered), act(other)))

    wrong = [
        f"{codec}, {options}"
        for at, options in enumerate(OPTIONS)
        for codec in (CODECS if every else [CODECS[at % len(CODECS)]])
        if not equal(partial(all_reduce, codec=codec, options=options))
    ]
    assert groups.communicator(ordered).stream(torch.device("cpu")) is not None
    assert groups.communicator(other).stream(torch.device("cpu")) is None
    assert not wrong
    assert equal(halves)


@on(3)
@on((2, 4), exhaustive=True)
def test_training_has_the_bits_of_that_with_tags(rank: int) -> None:
    found = []
    for group in two_groups():
        model = DDP(mlp(20, 200, 200), process_group=group, bucket_cap_mb=0.1)
        handle = gw.attach(model, bits=4, error_feedback=True, options=gw.Options(coalesce_bytes=0))
        train(model, range(4))
        assert handle.stats()["steps"] == 4
        assert handle.stats()["ratio"] > 4
        found.append(flat(model))
    assert torch.equal(*found)


def test_ranks_change_the_plan_of_shards_together(rank: int) -> None:
    """Of an FSDP2 module, where one rank is late with the next plan."""
    mesh = DeviceMesh.from_group(two_groups()[0], "cpu")
    model = fully_shard(nn.Linear(300, 200), mesh=mesh)
    handle = gw.attach(model, bits=4)

    def passes(count: int) -> list[int]:
        found = []
        for _ in range(count):
            model(torch.ones(4, 300)).square().mean().backward()
            found.append(handle.plan.version)
        return found

    found, late = passes(2), threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(prepared.Prepared, "reserve", lambda self: late.wait())
        update = handle.update(bits=8)
        if rank == 0:
            update.wait()
        dist.barrier()
        found += passes(3)
        late.set()
        update.wait()
    dist.barrier()
    found += passes(3)
    assert alike(found)
    assert found[:5] == [0] * 5
    assert found[-1] == 1


def test_the_backend_goes_in_order_where_its_group_does(rank: int) -> None:
    ours = dist.new_group(backend="gradwire")
    groups.keeps_order = lambda group, device: True
    model = DDP(nn.Linear(300, 200, bias=False), process_group=ours)
    model(torch.full((1, 300), float(rank + 1))).sum().backward()
    assert ours.stats()["calls"] == 1
    assert ours.stats()["ratio"] > 3
    assert groups.communicator(ours).stream(torch.device("cpu")) is not None
    (weight,) = model.parameters()
    assert torch.allclose(weight.grad, torch.full((200, 300), 1.5))


# ---- groups without a backend for CPU tensors, such as "nccl" alone


@on(3)
@on((2, 4), exhaustive=True)
def test_a_group_without_cpu_tensors_has_a_companion(rank: int) -> None:
    """A group that carries no CPU tensors gets a companion that does."""
    size = dist.get_world_size()
    store = dist.PrefixStore("bare/", dist.group.WORLD.get_group_store())
    bare = dist.ProcessGroup(store, rank, size)
    found = []
    for _ in range(2):  # the second must not read the first one's entries
        comm = Communicator(groups.host_transport(bare))
        found.append(comm.agree("a test", ["alike"]))
        error = str(caught(lambda comm=comm: comm.agree("a test", [f"rank {rank}"])))
        assert "ranks disagree on a test" in error
        assert f"rank {rank} has 'rank {rank}'" in error
        assert comm.transport.timeout > 0
        comm.close()
    assert found[0] == found[1]
    assert alike(found)
