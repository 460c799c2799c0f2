"""FSDP2's weights gathered as differences to the last version: nothing drifts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_model import batch, dumped, loaded, sharded
from test_sharded_weights import own_mesh, train
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import gradwire as gw
from gradwire.lang import layout
from products import every_pair
from ranks import as_processes, caught

pytestmark = pytest.mark.multiprocess

BLOCK = 256
FOUR = {"*.weight": f"randomshift:bits=4:block={BLOCK}", "embedding": "randomshift:bits=4"}


def attached(model: Any, weights: Any = FOUR, codec: Any = None, **options: Any) -> Any:
    return gw.attach(model, codec, weights=weights, keep="reference", **options)


def groups(model: Any) -> list[tuple[FSDPModule, Any]]:
    """(module, FSDP's record) of every group."""
    found = [m for m in model.modules() if isinstance(m, FSDPModule)]
    return [(m, m._get_fsdp_state()._fsdp_param_group) for m in found]


def weights_of(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Copies of the whole weights: as a forward gathers them, and as the optimizer has them."""
    decoded, exact = {}, {}
    names = {p: name for name, p in model.named_parameters()}
    for module, record in groups(model):
        for p in record.fsdp_params:
            exact[names[p.sharded_param]] = p.sharded_param.full_tensor().detach().clone()
        module.unshard()
        for p in record.fsdp_params:
            decoded[names[p.sharded_param]] = p._unsharded_param.detach().clone()
        module.reshard()
    return decoded, exact


def update(model: Any, optimizer: Any, step: int, size: float) -> None:
    made = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    for p in model.parameters():
        shard = p.to_local()
        p.grad = None
        with torch.no_grad():
            shard.add_(torch.randn(shard.shape, generator=made).mul_(size))
    optimizer.step()


def nothing_drifts(rank: int, weights: Any, dtype: torch.dtype | None) -> None:
    model = sharded(None if dtype is None else MixedPrecisionPolicy(param_dtype=dtype))
    attached(model, weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    decoded, _ = weights_of(model)
    size, levels = 1e-2, 15
    for step in range(12):
        update(model, optimizer, step, size)
        before = decoded
        decoded, exact = weights_of(model)
        for name, value in decoded.items():
            others = [torch.empty_like(value) for _ in range(dist.get_world_size())]
            dist.all_gather(others, value)
            assert all(torch.equal(value, other) for other in others), name
            target = exact[name].to(value.dtype)
            if "bias" in name:
                assert torch.equal(value, target)
                continue
            difference = target.float() - before[name].float()
            grid = (difference.max() - difference.min()).item() / levels
            rounding = target.abs().max().item() * torch.finfo(value.dtype).eps
            assert (value.float() - target.float()).abs().max().item() <= grid + rounding, name
            # It does not grow: an update of some 4 sigma, and an error of a step before it.
            assert grid <= 2 * (2 * 5 * size) / levels + 2 * rounding


@pytest.mark.parametrize(
    ("ranks", "weights", "dtype"),
    every_pair(
        [2, 3, 5],
        [FOUR, {"*.weight": "qsgd:bits=4:rounding=nearest"}],
        [None, torch.bfloat16],
    ),
)
def test_all_ranks_hold_the_same_weights_and_nothing_drifts(
    ranks: int, weights: Any, dtype: Any
) -> None:
    as_processes(ranks, nothing_drifts, weights, dtype)


def one_version_is_sent_once(rank: int) -> None:
    ranks = dist.get_world_size()
    model = sharded(mesh=own_mesh())
    handle = attached(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    # Per version: of four groups a gather, and an exchange per forward.
    for step in range(3):
        before = handle.stats()["weights_calls"]
        losses = []
        for last in (False, False, True):
            model.set_requires_gradient_sync(last)
            loss = model(batch(step), spare=True).square().mean()
            losses.append(loss.item())
            loss.backward()
        assert losses[0] == losses[1] == losses[2]
        assert handle.stats()["weights_calls"] - before == 4 + 3
        if step < 2 or rank:  # this rank alone leaves a step out: that hangs nothing
            optimizer.step()
        optimizer.zero_grad()
    assert_alike(model)
    # Weights that no optimizer has changed, also where torch counts no change of a tensor.
    weight = model.first.weight
    for double in (
        lambda: weight.to_local().mul_(2.0),
        lambda: weight.data.mul_(2.0),
        lambda: torch._foreach_mul_([weight], 2.0),
        lambda: weight.to_local().data.mul_(2.0 if rank else 1.0),  # on some ranks
    ):
        with torch.no_grad():
            double()
        decoded, exact = weights_of(model)
        error = (decoded["first.weight"] - exact["first.weight"]).abs().max()
        assert error < 0.1 * exact["first.weight"].abs().max()
    assert exact["first.weight"].abs().max() > 0.8
    # A message has a header of 48 bytes, and begins at a multiple of 16 bytes.
    numel = {name: p.to_local().numel() for name, p in model.named_parameters()}
    coded = [name for name in numel if name.endswith("weight") or name == "embedding"]
    codecs = {name: gw.RandomShift(4, 1024 if name == "embedding" else BLOCK) for name in coded}
    payloads: dict[str, int] = {}
    for name, own in numel.items():
        group = name.split(".")[0] if name.startswith(("first", "frozen", "spare")) else ""
        payloads.setdefault(group, 0)
        payloads[group] += layout(codecs[name]).nbytes(own) if name in coded else 4 * own
    optimizer.step()  # without gradients: nothing changes, and nothing is sent
    before = handle.stats()["weights_wire_bytes"]
    weights_of(model)
    assert handle.stats()["weights_wire_bytes"] - before <= 2 * 64 * ranks
    with torch.no_grad():
        weight.to_local().mul_(0.5)
    before = handle.stats()["weights_wire_bytes"]
    weights_of(model)
    messages = sum(-(-(48 + n) // 16) * 16 for n in payloads.values())
    asked = handle.stats()["weights_wire_bytes"] - before - messages * (ranks - 1)
    assert 0 < asked <= 2 * 64 * ranks


def assert_alike(model: Any) -> None:
    for name, value in weights_of(model)[0].items():
        others = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(others, value)
        assert all(torch.equal(value, other) for other in others), name


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_version_of_the_weights_is_sent_once(ranks: int) -> None:
    as_processes(ranks, one_version_is_sent_once)


def what_is_not_finite_stays_in_its_version(rank: int) -> None:
    model = sharded()
    attached(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weights_of(model)
    shard = model.second.weight.to_local()
    if rank == 0:
        with torch.no_grad():
            shard[0, 0] = float("nan")
    optimizer.step()
    decoded, _ = weights_of(model)
    assert not torch.isfinite(decoded["second.weight"]).all()
    if rank == 0:
        with torch.no_grad():
            shard[0, 0] = 0.5
    optimizer.step()
    for name, value in weights_of(model)[0].items():
        assert torch.isfinite(value).all(), name
    assert torch.equal(*(of["second.weight"] for of in weights_of(model)))  # sent as they are
    assert_alike(model)


def test_what_is_not_finite_does_not_last() -> None:
    as_processes(2, what_is_not_finite_stays_in_its_version)


def losses_fall(rank: int) -> None:
    model = sharded()
    handle = attached(model, codec="qsgd:bits=4")
    losses = train(model, 20)
    assert losses[-1] < 0.5 * losses[0]
    held = handle.stats()["weights_kept_bytes"]
    assert held >= 4 * sum(p.numel() for p in model.parameters())
    assert f"{held:,} bytes" in str(handle)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(batch(0)), model(batch(0)))
    handle.detach()
    train(model, 1)


def test_losses_fall_and_the_memory_is_told() -> None:
    as_processes(2, losses_fall)


# ---- checkpoints


def made() -> tuple[Any, Any, Any]:
    model = sharded()
    handle = attached(model, codec="qsgd:bits=4", error_feedback=True)
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


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def states(optimizer: Any) -> list[dict[str, torch.Tensor]]:
    trained = [p for p in optimizer.param_groups[0]["params"] if p.requires_grad]
    return [optimizer.state[p] for p in trained]


def copied(model: Any, optimizer: Any, handle: Any) -> Any:
    for module, _ in groups(model):
        module.reshard()
    shards = {name: p.to_local() for name, p in model.named_parameters()}
    kept = [{key: local(v) for key, v in of.items()} for of in states(optimizer)]
    return loaded(dumped((shards, kept, handle.state_dict())))


def restored(saved: Any) -> tuple[Any, Any, Any]:
    model, handle, optimizer = made()
    shards, kept, state = saved
    handle.load_state_dict(state)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.to_local().copy_(shards[name])
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    held = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()  # makes its state
    optimizer.zero_grad()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.to_local().copy_(held[name].to_local())
    for state_of, values in zip(states(optimizer), kept, strict=True):
        for key, value in values.items():
            local(state_of[key]).copy_(value)
    handle.load_state_dict(state)
    return model, handle, optimizer


def resumed(rank: int, evaluated: bool) -> None:
    model, handle, optimizer = made()
    steps(model, optimizer, 0)
    for p in model.parameters():  # all have a state
        p.grad = torch.zeros_like(p) if p.requires_grad and p.grad is None else p.grad
    optimizer.step()
    optimizer.zero_grad()
    if evaluated:  # the last version was gathered before it is saved
        with torch.no_grad():
            model(batch(7))
    saved = copied(model, optimizer, handle)
    expected = steps(model, optimizer, 3)
    other, its, again = restored(saved)
    assert dumped(its.state_dict()) == dumped(saved[2])  # before any gather
    assert steps(other, again, 3) == expected
    other, its, again = restored(saved)
    with torch.no_grad():  # a state, and other weights than it was saved with
        for p in other.parameters():
            p.to_local().add_(1.0)
    decoded, exact = weights_of(other)
    assert all((decoded[name] - exact[name]).abs().max() < 0.1 for name in exact)


@pytest.mark.parametrize("evaluated", [False, True])
def test_resuming_is_bit_identical(evaluated: bool) -> None:
    as_processes(2, resumed, evaluated)


def one_state(rank: int) -> bytes:
    model, handle, optimizer = made()
    steps(model, optimizer, 0)
    state = handle.full_state_dict()
    return dumped((state, state_of_weights(state)))


def state_of_weights(state: Any) -> dict[str, torch.Tensor]:
    parts = [one["weights"]["references"] for one in state["ranks"]]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def into_other_ranks(rank: int, saved: bytes, alone: bool) -> None:
    state, references = loaded(saved)
    model, handle, optimizer = made()
    if alone:
        with pytest.warns(UserWarning, match="residuals start at zero"):
            handle.load_state_dict(state["ranks"][0])
    else:
        handle.load_state_dict(state)
        again = handle.full_state_dict()
        for name, value in state_of_weights(again).items():
            assert torch.equal(value, references[name]), name
    steps(model, optimizer, 3)
    assert_alike(model)


@pytest.mark.parametrize(("ranks", "alone"), [(3, False), (2, False), (3, True)])
def test_a_state_loads_at_another_number_of_ranks(ranks: int, alone: bool) -> None:
    (saved, *_) = as_processes(5 if ranks == 2 else 2, one_state)
    as_processes(ranks, into_other_ranks, saved, alone)


def rank_0_alone(rank: int) -> None:
    """A rank that finds nothing of its own makes all ranks send all weights."""
    model, handle, optimizer = made()
    steps(model, optimizer, 0)
    state = handle.full_state_dict()["ranks"][0]
    handle.load_state_dict(state)
    decoded, exact = weights_of(model)
    assert all(torch.equal(decoded[name], exact[name]) for name in exact)
    steps(model, optimizer, 3)
    assert_alike(model)
    bad = {**state, "weights": {"references": 3}}
    assert "for 'weights'" in str(caught(lambda: handle.load_state_dict(bad)))
    del bad["weights"]
    wrong = {n: t.new_zeros(1, 1) for n, t in state["weights"]["references"].items()}
    bad = {**state, "rank": rank, "weights": {**state["weights"], "references": wrong}}
    assert "no shard of this module" in str(caught(lambda: handle.load_state_dict(bad)))


def test_bad_states() -> None:
    as_processes(2, rank_0_alone)
