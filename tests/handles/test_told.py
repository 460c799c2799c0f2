"""What a handle tells: `summary()`, before the first step and after, on one rank alone; and
`stats()`: calls, and the seconds that communication adds to backward. These are bounded by sleeps
whose place in the other rank's order is known: the bounds hold however slow the machine is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from ranks import on
from training import Acts, backward, mlp, nothing


def net(width: int = 400) -> nn.Sequential:
    return mlp(20, width, 30, 30)


def step(model: nn.Module) -> None:
    backward(model, torch.ones(4, 20))


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return int(found.group(1).replace(",", ""))


def expected(handle: Any) -> int:
    return number(r"about ([\d,]+) expected", str(handle))


def measured(handle: Any, model: nn.Module) -> int:
    """Bytes of a step, once DDP has its buckets and all is prepared."""
    for _ in range(3):
        step(model)
    before = handle.stats()
    step(model)
    after = handle.stats()
    assert after["steps"] == before["steps"] + 1
    return int(after["wire_bytes"] - before["wire_bytes"])


def alone(rank: int, make: Any) -> Any:
    """The handle; one rank prints it before the others have come to anything."""
    model = make()
    handle = gw.attach(model, bits=4, error_feedback=True, codecs={"4.weight": "terngrad"})
    if rank == 0:  # the others wait for this rank by now: asking them would be a hang
        text = str(handle)
        assert "transport: not known before the first step" in text
        assert "so far" not in text
    dist.barrier()
    return model, handle


@on(3)
@on(2, exhaustive=True)
def test_on_ddp(rank: int) -> None:
    ranks = dist.get_world_size()
    model, handle = alone(rank, lambda: DDP(net()))
    text = str(handle)
    numel = sum(p.numel() for p in model.parameters())
    assert repr(handle) == text.splitlines()[0]
    assert f"DDP module: 6 parameters, {numel:,} values; rank {rank} of {ranks}" in repr(handle)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:5]}
    assert rows["qsgd:bits=4"] == ["2", "20,000", "4.25", "yes"]
    assert rows["terngrad:form=minmax"][:2] == ["1", "900"]
    assert rows["none"] == ["3", "460", "32", "no"]
    residuals = 4 * (20000 + 900)
    assert f"0 bytes before the first step, {residuals:,} bytes from then on" in text
    told = expected(handle)
    # the formula is that of one bucket: then it is what is sent, to the byte
    assert told == measured(handle, model) == expected(handle)
    text = str(handle)
    assert f"4 steps, {told:,} bytes per step and rank" in text
    assert re.search(r"transport: (shm|torch_p2p)", text)
    assert f"state of this rank: {residuals:,} bytes\n" in text + "\n"
    raw = number(r"\(([\d,]+) uncompressed", text)
    assert raw == round(2 * (ranks - 1) / ranks * 4 * numel)

    methods = [(None, 0.0), ("powersgd:rank=2", 0.1), ("topk:density=0.1", 0.05)]
    for method, within in methods if ranks == 2 else methods[:2]:
        model = DDP(net())
        handle = gw.attach(model, method, error_feedback=True)
        both = torch.tensor([expected(handle), measured(handle, model)])
        if method is not None:  # small matrices have few chunks, which some ranks own
            dist.all_reduce(both)
        told, sent = both.tolist()
        assert abs(told - sent) <= within * sent, (method, told, sent)
    model = DDP(net())
    handle = gw.attach(model, options=gw.Options(algorithm="hierarchical"))
    if rank == 0:
        assert "algorithm: hierarchical" in str(handle)
    handle.update(bits=3)


@on(3)
@on(2, exhaustive=True)
def test_on_fsdp(rank: int) -> None:
    def sharded() -> nn.Module:
        mesh = DeviceMesh.from_group(dist.new_group(), "cpu")  # one that nothing has used
        model = net(401)  # shards of varied lengths
        model[4].weight.requires_grad_(False)
        for layer in (model[0], model):
            fully_shard(layer, mesh=mesh)
        return model

    model = sharded()
    handle = gw.attach(model, bits=4, error_feedback=True)
    dist.barrier()
    text = str(handle)
    assert "FSDP2 module: 6 parameters" in text
    assert "transport: not known before the first step" in text
    told = expected(handle)
    assert told == measured(handle, model)
    text = str(handle)
    assert re.search(r"transport: (shm|torch_p2p)", text)
    assert f"4 steps, {told:,} bytes per step and rank" in text
    stats = handle.stats()
    assert stats["raw_bytes"] == 4 * number(r"\(([\d,]+) uncompressed", text)
    handle.detach()
    assert str(handle) == text.replace("FSDP2 module", "FSDP2 module (detached)", 1)

    model = sharded()
    handle = gw.attach(model, bits=4, weights={"*": "bf16"})
    model[0].requires_grad_(False)
    told = expected(handle)
    assert told == measured(handle, model)
    of_weights = handle.stats()["weights_wire_bytes"] / 4
    assert f"{told:,} bytes of gradients and {of_weights:,.0f} of weights per step" in str(handle)


@on(3)
def test_doubles(rank: int) -> None:
    """No codec takes them, be it as weights or as gradients."""
    for held, reduced in (("float64", None), ("float64", "float32"), ("float32", "float64")):
        policy = MixedPrecisionPolicy(reduce_dtype=reduced and getattr(torch, reduced))
        model = fully_shard(net().to(getattr(torch, held)), mp_policy=policy)
        handle = gw.attach(model, bits=4)
        said = "uncompressed, since codecs take float32, float16 and bfloat16 alone: 6 parameters"
        assert f"{said} in torch.float64" in str(handle)
        backward(model, torch.ones(4, 20, dtype=getattr(torch, held)))
        assert 0.7 < handle.stats()["ratio"] < 1.4  # shards differ
        handle.detach()
    assert "uncompressed, since" not in str(gw.attach(DDP(net())))


@on(4)
def test_replicas(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(20, 41)), mesh=mesh)
    handle = gw.attach(model, bits=4)
    told = expected(handle)
    assert told == measured(handle, model)
    assert handle.stats()["raw_bytes"] == 4 * number(r"\(([\d,]+) uncompressed", str(handle))


@on(3)
def test_sparse(rank: int) -> None:
    """It expects what is sent during warm-up, too."""
    sent = {}
    for method in ("lwtopk:density=0.05", "dgc:density=0.1:warmup=1"):
        model = DDP(net(60))
        handle = gw.attach(model, method)
        for number in range(2):
            said, before = expected(handle), handle.stats()["wire_bytes"]
            step(model)
            now = sent[f"{method} {number}"] = handle.stats()["wire_bytes"] - before
            assert abs(said - now) < 0.1 * now, method
        handle.detach()
    assert sent["dgc:density=0.1:warmup=1 0"] > 1.5 * sent["dgc:density=0.1:warmup=1 1"]


LATE_S = 0.3


def late() -> None:
    time.sleep(LATE_S)


def timed_step(model: nn.Module) -> float:
    """Seconds of its backward."""
    model.zero_grad()
    loss = model(torch.ones(4, 20)).square().mean()
    dist.barrier()
    begun = time.perf_counter()
    loss.backward()
    return time.perf_counter() - begun


def exposed(handle: Any, model: nn.Module) -> tuple[float, float]:
    """Of a timed_step: (exposed, whole backward)."""
    before = handle.stats()["exposed_seconds"]
    whole = timed_step(model)
    return handle.stats()["exposed_seconds"] - before, whole


def tells(what: str) -> Callable[[], None]:
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
    handle = gw.attach(model, bits=4, options=gw.Options(coalesce_bytes=0))
    assert handle.stats()["calls"] == handle.stats()["exposed_seconds"] == 0
    for _ in range(3):
        timed_step(model)
    calls = handle.stats()["calls"]
    with model.no_sync():
        timed_step(model)
    assert handle.stats()["calls"] == calls  # nothing was averaged
    timed_step(model)
    stats = handle.stats()
    assert stats["calls"] == calls + 2
    assert stats["exposed_seconds"] > 0
    assert stats["kernel_seconds"] > 0

    # The other rank is late with all of its buckets: this one has computed all, and waits.
    if rank == 0:
        buckets, settle, tell = handle._reductions, handle._reductions._settle, tells("ddp waits")

        def spied() -> None:
            waits = SimpleNamespace(wait=lambda *_: tell() or True)
            late = SimpleNamespace(ended=waits, future=waits, finished=0.0, copied=False)
            buckets._pending.insert(0, late)
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
        timed_step(model)
    stats = handle.stats()
    assert (stats["steps"], stats["calls"]) == (3, 6)
    assert stats["exposed_seconds"] >= stats["seconds"] > 0
    if rank == 0:
        owner, tell = handle._reductions.owner, tells("fsdp waits")
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
