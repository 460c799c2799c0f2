"""FSDP2 with replicas (HSDP): the hop between them is per parameter too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_model import Model, backward, batch, dumped, gradients, loaded, same, sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from products import one_in
from ranks import as_processes, caught

pytestmark = pytest.mark.multiprocess


def hybrid(replicas: int) -> Any:
    shape = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    return sharded(mesh=mesh), mesh


def exactly_what_was_asked_for(rank: int, replicas: int, codec: str) -> None:
    """With two replicas or two shards, a sum does not depend on order."""
    (plain, _), (ours, _) = hybrid(replicas), hybrid(replicas)
    handle = gw.attach(ours, codec, exclude=["second.weight"])
    compressed = {n for n, f in handle.stats()["parameters"].items() if f["codec"] != "dense"}
    assert compressed == {"embedding", "first.weight", "frozen.weight", "spare.weight"}
    for step in range(3):
        expected, found = backward(plain, step), backward(ours, step)
        for name, gradient in expected.items():
            if gradient is None or not gradient.numel():
                assert same(gradient, found[name])
            elif name not in compressed or codec == "identity":
                assert same(gradient, found[name]), name
            else:
                assert not torch.equal(gradient, found[name]), name
                assert (gradient - found[name]).norm() < 0.6 * gradient.norm(), name
    groups = 2 if replicas < dist.get_world_size() else 1
    assert handle.stats()["calls"] == 3 * 2 * groups
    if codec == "qsgd":
        assert handle.stats()["ratio"] > 1.5  # low, since the tensors are small


@pytest.mark.parametrize(("replicas", "codec"), [(2, "identity"), (2, "qsgd")])
def test_what_is_compressed_is_what_was_asked_for(replicas: int, codec: str) -> None:
    as_processes(4, exactly_what_was_asked_for, replicas, codec)


def nothing_is_lost(rank: int, replicas: int) -> None:
    """Law 2: the own shard's part of a residual has the error between replicas, the other parts
    the errors of the scatter."""
    (plain, _), (ours, mesh) = hybrid(replicas), hybrid(replicas)
    shards, shard = mesh["shards"].size(), mesh["shards"].get_local_rank()
    handle = gw.attach(ours, "topk", density=0.1, error_feedback=True)
    total: dict[str, Any] = {}
    sent: dict[str, Any] = {}
    for step in range(6):
        for kept, model in ((total, plain), (sent, ours)):
            for name, gradient in backward(model, step, spare=True).items():
                if gradient is not None:
                    kept[name] = kept.get(name, 0.0) + gradient.double()
    states = handle.state_dict()["aggregators"]
    assert sorted(states) == ["embedding", "first.weight", "second.weight", "spare.weight"]
    for name, p in ours.named_parameters():
        if name not in states:
            continue
        residual = states[name]["residual"].double().view(p.shape)
        rows = -(-p.shape[0] // shards)
        mine = slice(shard * rows, (shard + 1) * rows)
        hop = residual[mine].clone() * shards  # its weight in the average is that of all shards
        assert hop.any() or not hop.numel()
        residual[mine] = 0
        dist.all_reduce(residual)
        dist.all_reduce(hop, group=mesh["replicas"].get_group())
        owed = (residual[mine] + hop) / dist.get_world_size()
        torch.testing.assert_close(sent[name] + owed, total[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("ranks", "replicas"), one_in(3, [(4, 2), (6, 2), (6, 3)]))
def test_nothing_is_lost(ranks: int, replicas: int) -> None:
    as_processes(ranks, nothing_is_lost, replicas)


def accumulates(rank: int) -> None:
    """Without the hop in some steps, an option of FSDP2; and back to plain FSDP2."""
    (plain, _), (ours, _) = hybrid(2), hybrid(2)
    handle = gw.attach(ours, "identity")
    for model in (plain, ours):
        model.zero_grad()
        for step in range(3):
            model.set_requires_all_reduce(step == 2)
            model(batch(step), spare=True).square().mean().backward()
    expected, found = gradients(plain), gradients(ours)
    assert all(same(gradient, found[name]) for name, gradient in expected.items())
    assert handle.stats()["calls"] == 3 * 3 + 3
    error = caught(lambda: handle.update(bits=2))
    assert isinstance(error, gw.ConfigError)
    assert "replicas (HSDP) cannot change" in str(error)
    handle.detach()
    expected, found = backward(plain, 3), backward(ours, 3)
    assert all(same(gradient, found[name]) for name, gradient in expected.items())
    assert handle.stats()["calls"] == 3 * 3 + 3


def test_steps_without_the_hop() -> None:
    as_processes(4, accumulates)


def resumes(rank: int, before: bytes | None) -> bytes:
    """In the same mesh bit-identical; in another, residuals are refused."""
    model, _ = hybrid(2 if before is None else 1)
    handle = gw.attach(model, "topk", density=0.1, error_feedback=True)
    if before is not None:
        state = loaded(before)
        error = caught(lambda: handle.load_state_dict(state))
        assert isinstance(error, gw.ConfigError)
        assert "4 ranks in 2 shards; this group has 4 in 4" in str(error)
        handle.load_state_dict({**state, "aggregators": {}})
        ddp = gw.attach(DDP(Model()), "topk", density=0.1, error_feedback=True)
        error = caught(lambda: ddp.load_state_dict(state))
        assert isinstance(error, gw.ConfigError)
        assert "4 ranks in 2 shards; this group has 4 under DDP" in str(error)
        own = {key: value for key, value in ddp.state_dict().items() if key != "aggregators"}
        hsdp, _ = hybrid(2)
        replicated = gw.attach(hsdp, "topk", density=0.1, error_feedback=True)
        for match, changed in (
            ("4 ranks under DDP; this group has 4 in 2 shards", {**own, "rank": rank}),
            ("sharded in other dimensions", {**state, "rank": rank, "dims": {"embedding": 1}}),
        ):
            error = caught(
                lambda changed=changed: replicated.load_state_dict(
                    {**changed, "aggregators": state["aggregators"]}
                )
            )
            assert isinstance(error, gw.ConfigError)
            assert match in str(error), error
        return before
    for step in range(3):
        backward(model, step, spare=True)
    saved = handle.state_dict()
    went_on = [backward(model, step, spare=True) for step in (3, 4)]
    again, _ = hybrid(2)
    other = gw.attach(again, "topk", density=0.1, error_feedback=True)
    other.load_state_dict(saved)
    for expected, step in zip(went_on, (3, 4), strict=True):
        for name, gradient in backward(again, step, spare=True).items():
            assert same(gradient, expected[name])
    return dumped(saved)


def test_state_resumes_in_the_same_mesh() -> None:
    first, *_ = as_processes(4, resumes, None)
    as_processes(4, resumes, first)
