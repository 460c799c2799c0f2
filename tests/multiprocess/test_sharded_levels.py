"""FSDP2 with learned levels, and with codecs of weights that change during training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_model import batch, dumped, loaded, sharded
from test_sharded_weights import gathered, own_mesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import gradwire as gw
from ranks import as_processes, caught

pytestmark = pytest.mark.multiprocess

WEIGHTS = {"*.weight": "learnedlevels:bits=3:block=128"}
GRADIENTS = {"codec": "learnedlevels:bits=3:block=128:rounding=stochastic"}
SMALLEST = 500  # the tests' weights are small


def made(weights: Any = WEIGHTS, keep: str = "none", **options: Any) -> tuple[Any, Any, Any]:
    model = sharded(**{"mesh": own_mesh(), **options})
    handle = gw.attach(model, **GRADIENTS, weights=weights, keep=keep)
    return model, handle, torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(
    model: Any, optimizer: Any, first: int, last: int, handle: Any = None, at: int = -1
) -> list[float]:
    """Losses; `handle` learns after step `at`."""
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        loss = model(batch(step), spare=True).square().mean()
        loss.backward()
        optimizer.step()
        if step == at:
            handle.learn_levels(SMALLEST, 300)
        losses.append(loss.item())
    return losses


def on_all(found: Any) -> list[Any]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    return parts


def errors(model: Any) -> dict[str, float]:
    """The L2 error of every matrix as it is gathered."""
    exact = {tuple(p.shape): p for p in model.parameters()}  # which differ
    return {
        name: (exact[tuple(t.shape)].full_tensor().detach() - t).norm().item()
        for name, t in gathered(model).items()
        if t.dim() > 1
    }


def learns(rank: int, keep: str) -> None:
    model, handle, optimizer = made(keep=keep)
    losses = steps(model, optimizer, 0, 5)
    shards = {name: p.to_local().clone() for name, p in model.named_parameters()}
    even = errors(model)
    assert handle.learn_levels(SMALLEST, 300) == 7  # the frozen layer has no gradient
    found = handle.plan.levels
    assert set(found.weights) == {f"{n}.weight" for n in ("first", "frozen", "second", "spare")}
    assert set(found.gradients) == {f"{n}.weight" for n in ("first", "second", "spare")}
    assert len({str(state) for state in on_all(found.state())}) == 1
    for levels in (*found.weights.values(), *found.gradients.values()):
        assert len(levels) == 8
        assert list(levels) == sorted(levels)
    if keep != "reference":  # which has the even levels' weights until an optimizer steps
        fitted = errors(model)
        learned = [name for name in even if "embedding" not in name]
        assert all(fitted[name] < even[name] for name in learned), (even, fitted)
    losses += steps(model, optimizer, 5, 15)
    assert losses[-1] < 0.5 * losses[0]
    whole = {name: t.double().sum().item() for name, t in gathered(model).items()}
    assert len({str(one) for one in on_all(whole)}) == 1
    for name, p in model.named_parameters():
        assert p.to_local().shape == shards[name].shape
    codecs = {c for gather in handle.weights._gathers for w in gather.weights if (c := w.codec)}
    assert any(codec.levels == found.weights["second.weight"] for codec in codecs)
    member = handle._members["second.weight"].aggregator
    assert member.codec.levels == found.gradients["second.weight"]


@pytest.mark.parametrize(("ranks", "keep"), [(2, "none"), (3, "payload"), (5, "reference")])
def test_levels_are_learned_and_equal_on_all_ranks(ranks: int, keep: str) -> None:
    as_processes(ranks, learns, keep)


def of_replicas(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model, handle, optimizer = made(mesh=mesh)
    steps(model, optimizer, 0, 6, handle, at=2)
    assert handle.plan.levels.weights
    assert handle.plan.levels.gradients
    assert len({str(state) for state in on_all(handle.plan.levels.state())}) == 1
    whole = {name: t.double().sum().item() for name, t in gathered(model).items()}
    assert len({str(one) for one in on_all(whole)}) == 1


def test_replicas_learn_the_same_levels() -> None:
    as_processes(4, of_replicas)


def local(tensors: Any) -> Any:
    return {name: t.to_local().clone() for name, t in tensors.items() if isinstance(t, DTensor)}


def resumes(rank: int, keep: str) -> None:
    model, handle, _ = made(keep=keep)
    plain = torch.optim.SGD(model.parameters(), lr=1e-4)
    steps(model, plain, 0, 4, handle, at=2)
    shards, state = local(model.state_dict()), loaded(dumped(handle.state_dict()))
    expected = steps(model, plain, 4, 8)
    model, handle, _ = made(keep=keep)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.to_local().copy_(shards[name])
    handle.load_state_dict(state)
    assert expected[-1] < float("inf")
    assert handle.plan.levels.state() == state["levels"]
    assert steps(model, torch.optim.SGD(model.parameters(), lr=1e-4), 4, 8) == expected
    fresh = handle.state_dict()
    fresh.pop("levels")
    handle.load_state_dict(fresh)
    assert "levels" not in handle.state_dict()
    bad = caught(lambda: handle.load_state_dict({**state, "levels": {"weights": 3}}))
    assert "for 'levels'" in str(bad)


@pytest.mark.parametrize("keep", ["none", "reference"])
def test_resuming_is_bit_identical(keep: str) -> None:
    as_processes(2, resumes, keep)


def saves(rank: int) -> bytes:
    model, handle, optimizer = made()
    steps(model, optimizer, 0, 3, handle, at=1)
    return dumped(handle.full_state_dict())


def loads(rank: int, state: bytes) -> None:
    model, handle, optimizer = made()
    handle.load_state_dict(loaded(state))
    first = loaded(state)["ranks"][0]["levels"]
    assert handle.plan.levels.state() == first
    assert first["weights"]
    assert first["gradients"]
    steps(model, optimizer, 3, 5)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1)])
def test_levels_load_at_another_number_of_ranks(before: int, after: int) -> None:
    state = as_processes(before, saves)[0]
    as_processes(after, loads, state)


def updates(rank: int, keep: str) -> None:
    model, handle, optimizer = made(keep=keep)
    steps(model, optimizer, 0, 3, handle, at=1)
    known = handle.plan.levels

    def adopted(**changes: Any) -> int:
        """Bytes of a step's weights once an update is in force."""
        update = handle.update(**changes)
        update.wait(30)
        before = handle.stats()["weights_wire_bytes"]
        for step in range(20):
            steps(model, optimizer, 20 + step, 21 + step)
            if update.in_force:
                break
        assert update.in_force
        steps(model, optimizer, 40, 41)
        before = handle.stats()["weights_wire_bytes"]
        steps(model, optimizer, 41, 42)
        whole = {name: t.double().sum().item() for name, t in gathered(model).items()}
        assert len({str(one) for one in on_all(whole)}) == 1
        return int(handle.stats()["weights_wire_bytes"]) - before

    three = adopted(exclude=["first.*"])
    assert handle.plan.levels == known
    five = adopted(weights={"*.weight": "learnedlevels:bits=5:block=128"})
    codecs = [w.codec for g in handle.weights._gathers for w in g.weights if w.codec]
    assert {codec.bits for codec in codecs} == {5}
    assert {c.levels for c in codecs} == {None}
    exact = adopted(weights={"*": "identity"})
    assert three < five < exact
    back = adopted(weights=WEIGHTS)
    assert back == three
    codecs = [w.codec for g in handle.weights._gathers for w in g.weights if w.codec]
    assert {codec.levels for codec in codecs} >= set(known.weights.values())
    bad = caught(lambda: handle.update(weights="topk:density=0.1"))
    assert "sends a part of the values" in str(bad)


@pytest.mark.parametrize("keep", ["none", "payload", "reference"])
def test_codecs_of_weights_change_during_training(keep: str) -> None:
    as_processes(2, updates, keep)


def refused(rank: int) -> None:
    model, handle, optimizer = made()
    assert "has no gradient" in str(caught(lambda: handle.learn_levels(SMALLEST, 300)))
    steps(model, optimizer, 0, 1)
    assert "no parameter of 100000 values" in str(caught(handle.learn_levels))
    assert handle.learn_levels(SMALLEST, 300) == 7
    handle.detach()
    assert "detach" not in str(caught(handle.stats))
    assert "any more" in str(caught(lambda: handle.learn_levels(SMALLEST, 300)))
    other = gw.attach(sharded(mesh=own_mesh()), "qsgd")
    assert "learnedlevels:rounding=stochastic" in str(caught(lambda: other.learn_levels(1)))
    assert "attach was given no weights" in str(caught(lambda: other.update(weights="bf16")))


def test_bad_input() -> None:
    as_processes(2, refused)
