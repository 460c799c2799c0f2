"""FSDP2's weights gathered through codecs: the same bits on all ranks and in all of a step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_model import backward, batch, sharded
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import gradwire as gw
from gradwire.lang import layout
from products import every_pair
from ranks import as_processes, caught

pytestmark = pytest.mark.multiprocess

# The tests' weights are small: patterns ask for them by name.
ALL = {"*.weight": "randomshift:bits=8", "embedding": "randomshift:bits=8"}


def own_mesh() -> DeviceMesh:
    """Handles of one group draw different random numbers; those of several, the same."""
    return DeviceMesh.from_group(dist.new_group(), "cpu")


def gathered(model: FSDPModule) -> dict[str, torch.Tensor]:
    """Copies of the whole weights, as a forward gathers them."""
    found = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            for name, p in module.named_parameters():
                if not isinstance(p, DTensor):
                    found[f"{type(module).__name__} {name} {tuple(p.shape)}"] = p.detach().clone()
            module.reshard()
    return found


def train(model: Any, steps: int, lr: float = 1e-2) -> list[float]:
    made = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        made.zero_grad()
        loss = model(batch(step), spare=True).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        losses.append(loss.item())
    return losses


def weights_are_alike(rank: int, weights: Any, dtype: torch.dtype | None) -> None:
    policy = None if dtype is None else MixedPrecisionPolicy(param_dtype=dtype)
    model = sharded(policy)
    plain = gathered(model)
    shards = {name: p.to_local().clone() for name, p in model.named_parameters()}
    gw.attach(model, None, weights=weights)
    once, twice = gathered(model), gathered(model)
    changed = 0
    for name, value in once.items():
        assert torch.equal(value, twice[name]), name  # one version: one encoding
        others = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(others, value)
        assert all(torch.equal(value, other) for other in others), name
        step = (plain[name].max() - plain[name].min()).item() / 255 + 2e-2 * (dtype is not None)
        torch.testing.assert_close(value, plain[name], rtol=0, atol=step)
        changed += not torch.equal(value, plain[name])
    assert changed >= 3
    for name, p in model.named_parameters():
        assert torch.equal(p.to_local(), shards[name]), f"the optimizer's {name}"


@pytest.mark.parametrize(
    ("weights", "ranks", "dtype"),
    every_pair(
        [ALL, {"*": "qsgd:bits=8:rounding=nearest"}, {"*": "randomshift:bits=8:block=256"}],
        [2, 3, 5],
        [None, torch.bfloat16],
    ),
)
def test_all_ranks_hold_the_same_weights(weights: Any, ranks: int, dtype: Any) -> None:
    as_processes(ranks, weights_are_alike, weights, dtype)


def losses_are_those_of_fsdp(rank: int, dtype: torch.dtype | None, tolerance: float) -> None:
    # gloo rounds every partial sum of bf16, gradwire the whole sum: so sums are of fp32 here.
    policy = None if dtype is None else MixedPrecisionPolicy(dtype, torch.float32)
    # Sums of several ranks differ in their last bits, and a large rate would amplify that.
    plain = train(sharded(policy), 20, lr=1e-3)
    model = sharded(policy)
    gw.attach(model, "identity", weights={"*": "identity"})
    found = train(model, 20, lr=1e-3)
    if tolerance:
        assert found == pytest.approx(plain, rel=tolerance)
    else:
        assert found == plain
    for keep in ("none", "payload", "redraw"):
        ours = sharded(policy)
        gw.attach(ours, "qsgd", bits=8, weights=ALL, keep=keep)
        losses = train(ours, 20)
        assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("ranks", "dtype", "tolerance"),
    [(2, None, 0), (3, None, 1e-5), (5, torch.bfloat16, 1e-3)],
)
def test_with_identity_losses_are_those_of_fsdp(ranks: int, dtype: Any, tolerance: float) -> None:
    as_processes(ranks, losses_are_those_of_fsdp, dtype, tolerance)


def one_version_is_encoded_once(rank: int) -> None:
    """Payloads sent twice, kept payloads and micro-batches decode to the same bits."""
    found = {}
    for keep in ("none", "payload", "redraw"):
        model = sharded(mesh=own_mesh())
        handle = gw.attach(model, None, weights={"*": "randomshift:bits=4"}, keep=keep)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
        losses = []
        for step in range(3):
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                loss = model(batch(step), spare=True).square().mean()
                losses.append(loss.item())
                loss.backward()
            assert losses[-2] == losses[-1]
            optimizer.step()
            optimizer.zero_grad()
        shards = torch.cat([p.to_local().flatten() for p in model.parameters()])
        found[keep] = losses, shards, handle.stats()["weights_calls"]
    # Four groups; the root and what needs no gradient are gathered in forward alone.
    forward = 3 * 2 * 4
    assert found["payload"][2] == forward < found["none"][2] == found["redraw"][2]
    assert found["none"][0] == found["payload"][0] != found["redraw"][0]
    assert torch.equal(found["none"][1], found["payload"][1])
    assert not torch.equal(found["none"][1], found["redraw"][1])


def test_one_version_of_the_weights_is_encoded_once() -> None:
    as_processes(2, one_version_is_encoded_once)


def reductions_are_no_versions(rank: int) -> None:
    """Micro-batches that are each reduced see one version: that of the optimizer's last step."""
    model = sharded()
    gw.attach(model, None, weights={"*": "randomshift:bits=4"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for _ in range(3):
        for _ in range(2):
            loss = model(batch(0), spare=True).square().mean()
            losses.append(loss.item())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # Before the first step of an optimizer nobody knows that one trains the module.
    assert losses[2] == losses[3]
    assert losses[4] == losses[5]
    assert losses[3] != losses[4]


def test_a_reduction_makes_no_new_version() -> None:
    as_processes(2, reductions_are_no_versions)


def replicas_are_alike(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = sharded(mesh=mesh)
    gw.attach(model, "qsgd", weights=ALL)
    train(model, 2)
    for name, value in gathered(model).items():
        others = [torch.empty_like(value) for _ in range(4)]
        dist.all_gather(others, value)
        assert all(torch.equal(value, other) for other in others), name


def test_replicas_decode_the_same_weights() -> None:
    as_processes(4, replicas_are_alike)


def recomputed(rank: int) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    def run(keep: str, checkpointed: bool) -> torch.Tensor:
        model = sharded(mesh=own_mesh())
        if checkpointed:
            chosen = lambda module: module is model.first  # noqa: E731
            apply_activation_checkpointing(model, check_fn=chosen)
        gw.attach(model, None, weights={"*": "randomshift:bits=4"}, keep=keep)
        train(model, 3)
        return torch.cat([p.to_local().flatten() for p in model.parameters()])

    for keep in ("none", "payload"):
        assert torch.equal(run(keep, True), run(keep, False))


def test_recomputed_activations_see_the_same_weights() -> None:
    as_processes(2, recomputed)


def bytes_are_those_of_the_formula(rank: int) -> None:
    ranks = dist.get_world_size()
    model = sharded()
    handle = gw.attach(model, "qsgd", bits=8, weights=ALL)
    codec, payloads = gw.RandomShift(bits=8), {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()
    for name, p in model.named_parameters():
        own = p.to_local().numel()
        named = name.endswith("weight") or name == "embedding"
        group = name.split(".")[0] if name.startswith(("first", "frozen", "spare")) else ""
        payloads.setdefault(group, 0)
        payloads[group] += layout(codec).nbytes(own) if named else 4 * own
    # A message has a header of 48 bytes, and begins at a multiple of 16 bytes.
    messages = sum(-(-(48 + n) // 16) * 16 for n in payloads.values())
    stats = handle.stats()
    assert stats["weights_calls"] == 4
    assert stats["weights_wire_bytes"] == messages * (ranks - 1)
    assert stats["wire_bytes"] == 0  # gradients are counted apart


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_bytes_of_weights_are_those_of_the_formula(ranks: int) -> None:
    as_processes(ranks, bytes_are_those_of_the_formula)


def several_ways_to_reshard(rank: int, reshard: bool | int) -> None:
    """With a number, backward gathers decoded values as they are, from fewer ranks."""
    found = {}
    for keep in ("none", "payload"):
        model = sharded(mesh=own_mesh(), reshard_after_forward=reshard)
        gw.attach(model, None, weights={"*": "randomshift:bits=4"}, keep=keep)
        train(model, 3)
        found[keep] = torch.cat([p.to_local().flatten() for p in model.parameters()])
    always = sharded(mesh=own_mesh())
    gw.attach(always, None, weights={"*": "randomshift:bits=4"})
    train(always, 3)
    expected = torch.cat([p.to_local().flatten() for p in always.parameters()])
    assert torch.equal(found["none"], expected)
    assert torch.equal(found["payload"], expected)


@pytest.mark.parametrize("reshard", [False, 2])
def test_it_does_not_matter_when_weights_are_resharded(reshard: bool | int) -> None:
    as_processes(4 if reshard == 2 else 2, several_ways_to_reshard, reshard)


def resumed(rank: int) -> None:
    def made() -> tuple[Any, Any, Any]:
        model = sharded()
        handle = gw.attach(model, "qsgd", bits=4, error_feedback=True, weights=ALL)
        return model, handle, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)

    def steps(model: Any, optimizer: Any, first: int) -> list[float]:
        losses = []
        for step in range(first, first + 3):
            optimizer.zero_grad()
            loss = model(batch(step), spare=step % 2 == 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, handle, optimizer = made()
    steps(model, optimizer, 0)
    saved = [{k: v.to_local().clone() for k, v in model.state_dict().items()}]
    moments, state = optimizer.state_dict(), handle.state_dict()
    moments = {**moments, "state": {k: dict(v) for k, v in moments["state"].items()}}
    for kept in moments["state"].values():
        for key, value in kept.items():
            kept[key] = value.clone()
    expected = steps(model, optimizer, 3)

    def resumes(model: Any, handle: Any, optimizer: Any) -> bool:
        with torch.no_grad():
            for name, value in model.state_dict().items():
                value.to_local().copy_(saved[0][name])
        optimizer.load_state_dict(copy.deepcopy(moments))  # which it keeps, and changes
        handle.load_state_dict(state)
        return steps(model, optimizer, 3) == expected

    assert resumes(*made())
    with torch.no_grad():
        model(batch(0))  # gathers the version that is about to be replaced
    assert resumes(model, handle, optimizer)  # back in time


def test_resuming_is_bit_identical() -> None:
    as_processes(2, resumed)


def refused(rank: int) -> None:
    def error(**arguments: Any) -> str:
        return str(caught(lambda: gw.attach(sharded(), **arguments)))

    assert "sends a part of the values" in error(weights="topk:density=0.1")
    assert "rounding=stochastic" in error(weights="qsgd:bits=8")
    assert "weights='powersgd'" in error(weights="powersgd")
    assert "matches no parameter" in error(weights={"nothing.*": "bf16"})
    assert "'none', 'payload', 'redraw', 'reference'" in error(weights="randomshift", keep="all")
    assert "give weights, too" in error(keep="payload")
    assert "give a codec by name" in error(weights=8)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    assert "weights and keep are for FSDP2" in str(caught(lambda: gw.attach(ddp, weights="bf16")))
    model = sharded()
    different = "randomshift:bits=8" if rank else "randomshift:bits=7"
    assert "disagree" in str(caught(lambda: gw.attach(model, weights={"*": different})))


def test_bad_input() -> None:
    as_processes(2, refused)


def blocks(rank: int) -> None:
    model = sharded()
    handle = gw.attach(model, "qsgd", bits=4, codecs={"first.*": "qsgd:block=64"})
    of = {p.name: p.codec for p in handle.plan.parameters}
    assert of["second.weight"] == gw.QSGD(bits=4, block=1024)
    assert of["first.weight"] == gw.QSGD(block=64)
    changed = handle.update("qsgd:bits=3")
    changed.wait(20)
    for step in range(3):
        backward(model, step)
    assert changed.in_force
    of = {p.name: p.codec for p in handle.plan.parameters}
    assert of["second.weight"] == gw.QSGD(bits=3, block=1024)


def test_blocks_have_1024_values_by_default() -> None:
    as_processes(2, blocks)


def micro_batches_after_a_resume(rank: int, keep: str) -> None:
    """Micro-batches that are each reduced see one version, before a new optimizer's first step,
    too."""

    def made() -> tuple[Any, Any, Any]:
        model = sharded(mesh=own_mesh())
        codec = "randomshift:bits=4"
        handle = gw.attach(model, "qsgd:bits=4", weights={"*": codec}, keep=keep)
        return model, handle, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def trained(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            for micro in range(2):
                loss = model(batch(2 * step + micro), spare=True).square().mean()
                losses.append(loss.item())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses

    model, handle, optimizer = made()
    trained(model, optimizer, 0, 2)
    weights, moments = model.state_dict(), copy.deepcopy(optimizer.state_dict())
    weights = {name: value.clone() for name, value in weights.items()}
    state = handle.full_state_dict()
    expected = trained(model, optimizer, 2, 4)
    model, handle, optimizer = made()
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    handle.load_state_dict(state)
    assert trained(model, optimizer, 2, 4) == expected


@pytest.mark.parametrize("keep", ["none", "reference"])
def test_micro_batches_after_a_resume(keep: str) -> None:
    as_processes(2, micro_batches_after_a_resume, keep)


def own_gathers_are_refused(rank: int) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    class Mine(DefaultAllGather):
        pass

    model = sharded()
    model.first.set_custom_all_gather(Mine())
    error = caught(lambda: gw.attach(model, "qsgd", weights=ALL))
    assert isinstance(error, gw.ConfigError)
    assert "custom all-gather, Mine" in str(error)
    gw.attach(model, "qsgd")


def test_an_all_gather_of_the_scripts_own_is_refused() -> None:
    as_processes(2, own_gathers_are_refused)
