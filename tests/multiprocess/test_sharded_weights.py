"""FSDP2's weights gathered through codecs: the same bits on all ranks and in all of a step."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scenario import (
    ALL,
    batch,
    by_layer,
    exact,
    gathered,
    message_bytes,
    own_mesh,
    replicated,
    sgd,
    sharded,
    shards,
    steps,
    train,
    unlike,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

import gradwire as gw
from gradwire.planner.weights import KEEP
from ranks import on
from rooms.handles import sharded_attach

FOUR = {"*": "randomshift:bits=4"}
GIVEN = (
    ALL,
    {"*": "qsgd:bits=8"},
    {"*": "randomshift:bits=8:block=256"},
    {"*": "fp8"},
)
# Of differences to the version before.
FEWER = {"*.weight": "randomshift:bits=4:block=256", "embedding": "randomshift:bits=4"}
NEAREST = {"*.weight": "qsgd:bits=4:rounding=nearest"}


@on(2, (None, None, GIVEN[:2]), (torch.bfloat16, None, GIVEN[2:]), (None, "reference", (FEWER,)))
@on(3, (torch.bfloat16, None, GIVEN[:1]), (torch.bfloat16, "reference", (FEWER,)))
@on((2, 3, 5), (None, None, GIVEN), (torch.bfloat16, None, GIVEN), exhaustive=True)
@on((3, 5), *product((None, torch.bfloat16), ("reference",), [(FEWER, NEAREST)]), exhaustive=True)
def test_weights_are_alike_and_near_and_nothing_drifts(
    rank: int, dtype: torch.dtype | None, keep: str | None, given: Any
) -> None:
    """Of each version; the optimizer's are exact, and so are those without a codec."""
    differences = keep == "reference"
    for weights in given:
        model = sharded(None if dtype is None else MixedPrecisionPolicy(param_dtype=dtype))
        first = gathered(model)
        gw.attach(model, None, weights=weights, options=gw.Options(keep=keep))
        decoded = gathered(model) if differences else first
        size, levels = 1e-2, 15 if differences else 255
        for version in range(6 if differences else 2):
            if version or differences:
                changed(model, version, size)
            optimizers = shards(model)
            before, decoded, again = decoded, gathered(model), gathered(model)
            said = weights, dtype, version
            assert not unlike(decoded), said
            assert torch.equal(shards(model), optimizers), "the optimizer's"
            inexact = 0
            for name, wanted in exact(model).items():
                value, target = decoded[name], wanted.to(decoded[name].dtype)
                assert torch.equal(value, again[name]), (said, name)  # one encoding
                if "bias" in name and "*" not in weights:
                    assert torch.equal(value, target)
                    continue
                sent = target.float() - (before[name].float() if differences else 0)
                grid = (sent.max() - sent.min()).item() / levels
                rounding = target.abs().max().item() * torch.finfo(value.dtype).eps
                nearby = 2**-4 if weights == {"*": "fp8"} else 0
                torch.testing.assert_close(
                    value.float(), target.float(), rtol=nearby, atol=grid + rounding
                )
                inexact += not torch.equal(value, target)
                # It does not grow: an update of some 4 sigma, and an error of a step before it.
                assert not differences or grid <= 2 * (2 * 5 * size) / levels + 2 * rounding
            assert inexact >= 3, said


def changed(model: Any, version: int, size: float) -> None:
    """As by a step of an optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    made = torch.Generator().manual_seed(1000 * version + dist.get_rank())
    with torch.no_grad():
        for p in model.parameters():
            shard = p.to_local()
            shard.add_(torch.randn(shard.shape, generator=made).mul_(size))
    optimizer.step()


def test_one_version_is_encoded_once(rank: int) -> None:
    """Payloads sent twice, kept payloads and micro-batches decode to the same bits."""
    found = {}
    for keep in ("none", "payload", "redraw"):
        model = sharded(mesh=own_mesh())
        handle = gw.attach(model, None, weights=FOUR, options=gw.Options(keep=keep))
        optimizer = sgd(model)
        losses = []
        for step in range(2):
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                loss = model(batch(step), spare=True).square().mean()
                losses.append(loss.item())
                loss.backward()
            assert losses[-2] == losses[-1]
            optimizer.step()
            optimizer.zero_grad()
        found[keep] = losses, shards(model), handle.stats()["weights_calls"]
    # Four groups; the root and what needs no gradient are gathered in forward alone. Where payloads
    # are kept, the frozen group is gathered once, and each forward asks if it has changed.
    forwards = 2 * 2
    assert found["payload"][2] == forwards * 3 + 1 + forwards
    assert found["none"][2] == found["redraw"][2] > forwards * 4
    assert found["none"][0] == found["payload"][0] != found["redraw"][0]
    assert torch.equal(found["none"][1], found["payload"][1])
    assert not torch.equal(found["none"][1], found["redraw"][1])


@on(2, "while unsharded", "on meta")
def test_reductions_are_no_versions(rank: int, how: str) -> None:
    """Micro-batches that are each reduced see one version: that of the optimizer's last step,
    however the handle was attached."""
    with torch.device("meta" if how == "on meta" else "cpu"):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    x = torch.randn(8, 64)
    if how == "while unsharded":
        model(x)
    gw.attach(model, None, weights=FOUR)
    if how == "on meta":
        model.to_empty(device="cpu")
        for p in model.parameters():
            nn.init.normal_(p)
    losses = []
    optimizer: Any = None
    for _ in range(3):
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        # With the sharded parameters, which the module has once backward has ended.
        optimizer = optimizer or sgd(model)
        optimizer.step()
        optimizer.zero_grad()
    # Before the first step of an optimizer nobody knows that one trains the module.
    assert losses[2] == losses[3] != losses[4] == losses[5]


@on(2)
@on(3)
@on(5, exhaustive=True)
def test_bytes_are_those_of_the_formula(rank: int) -> None:
    model = sharded()
    handle = gw.attach(model, "qsgd", bits=8, weights=ALL, options=gw.Options(keep="none"))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()
    coded = gw.codecs.RandomShift(bits=8)
    sent = message_bytes(model, lambda name: None if name.endswith("bias") else coded)
    stats = handle.stats()
    assert stats["weights_calls"] == 4
    assert stats["weights_wire_bytes"] == sent * (dist.get_world_size() - 1)
    assert stats["wire_bytes"] == 0  # gradients are counted apart
    assert stats["weights_ratio"] == stats["weights_raw_bytes"] / stats["weights_wire_bytes"]
    assert stats["weights_exposed_seconds"] > 0 < stats["weights_seconds"]


@on(2, "none", "reference")
def test_errors_of_weights_are_told(rank: int, keep: str) -> None:
    model = sharded()
    handle = gw.attach(model, None, weights=ALL, options=gw.Options(keep=keep))
    optimizer = sgd(model)
    assert "weights_nmse" not in handle.metrics(every=1)
    steps(model, optimizer, 0, 2)  # with keep="reference" the next are sent as differences
    with torch.no_grad():
        model(batch(2))
    model.reshard()
    own = model.embedding.to_local().detach().double()
    found = handle.metrics(layers=True, every=1)
    model.unshard()
    decoded = model.embedding.detach().double().split(-(-5 // dist.get_world_size()))[rank]
    model.reshard()
    expected = ((own - decoded).square().sum() / own.square().sum()).item()
    assert abs(found["embedding/weights_nmse"] - expected) < 1e-4 * expected
    assert 0 < found["weights_nmse"] < 1e-3
    assert found["weights_ratio"] > 1
    assert found["weights_exposed_seconds"] > 0


def test_payloads_are_kept_where_they_fit(rank: int) -> None:
    """The memory of any rank counts, and one of them may have none."""
    free = sharded_attach.free_bytes
    for least, keep in ((2**40, "payload"), (0, "none")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharded_attach, "free_bytes", lambda device, of=(2**40, least)[rank]: of)
            model = sharded(mesh=replicated(1))
            handle = gw.attach(model, None, weights=ALL)
        assert handle.plan.weights.keep == keep
    assert free(torch.device("cpu")) > 2**20


@on(2, "payload", "reference")
def test_frozen_weights_are_sent_once(rank: int, keep: str) -> None:
    """As with adapters: until a rank has changed them, here behind torch's back."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 8))
    model[0].requires_grad_(False)
    by_layer(model, reshard_after_forward=True)
    handle = gw.attach(
        model, None, weights={"0.weight": "randomshift:bits=8"}, options=gw.Options(keep=keep)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = []

    def step(trains: bool = True) -> None:
        before = handle.stats()["weights_wire_bytes"]
        with torch.set_grad_enabled(trains):
            loss = model(torch.randn(4, 64)).square().mean()
        if trains:
            loss.backward()
            optimizer.step()
        sizes.append(handle.stats()["weights_wire_bytes"] - before)

    for trains in (True, True, True, False, False):
        step(trains)
    payload = 64 * 512 // dist.get_world_size()
    assert sizes[0] > payload > max(sizes[1:])
    assert handle.stats()["weights_frozen_values"] == 64 * 512 + 512
    before = gathered(model)["0.weight"]
    if rank == 0:
        model[0].weight.to_local().data.add_(1.0)
    step()
    step()
    assert sizes[-2] > payload > sizes[-1]
    after = gathered(model)["0.weight"]
    assert not unlike({"frozen": after})
    rows = after - before
    assert 0.9 < rows[:256].mean() < 1.1
    assert rows[256:].abs().max() < 0.05


def test_weights_frozen_later_are_those_of_then(rank: int) -> None:
    """And again, after a time in which they were trained: payloads of before are out of date."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    by_layer(model, reshard_after_forward=True)
    gw.attach(model, None, weights={"*": "identity"}, options=gw.Options(keep="payload"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(1, 64)
    for trained in (True, False, True, False):
        model[0].requires_grad_(trained)
        first, bias, second, offset = [p.full_tensor().detach() for p in model.parameters()]
        found = model(x)
        torch.testing.assert_close(found, (x @ first.T + bias) @ second.T + offset)
        found.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@on(2, False)
@on(4, 2)
def test_it_does_not_matter_when_weights_are_resharded(rank: int, reshard: bool | int) -> None:
    """With a number, backward gathers decoded values as they are, from fewer ranks."""

    def run(keep: str, **options: Any) -> torch.Tensor:
        model = sharded(mesh=own_mesh(), **options)
        gw.attach(model, None, weights=FOUR, options=gw.Options(keep=keep))
        train(model, 2)
        return shards(model)

    always = run("none")
    for keep in ("none", "payload"):
        assert torch.equal(run(keep, reshard_after_forward=reshard), always), keep


# ---- weights that no codec holds, as masks have them: they are gathered as they are


LEAST = torch.finfo(torch.float32).min


class Masked(nn.Module):
    """A frozen mask beside a matrix that is trained; the mask's low values are rank 0's."""

    def __init__(self, low: float) -> None:
        super().__init__()
        mask = torch.zeros(5, 64)  # uneven shards
        mask[0, 1::2] = low
        self.mask = nn.Parameter(mask, requires_grad=False)
        self.table = nn.Parameter(torch.randn(5, 64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (torch.softmax(self.mask, -1) * self.table).sum()


@on(2, *KEEP)
def test_a_mask_is_gathered_as_it_is(rank: int, keep: str) -> None:
    for low in (-torch.inf, LEAST, -1e4):
        model: Any = Masked(low)
        mask = model.mask.detach().clone()
        fully_shard(model, mesh=own_mesh(), reshard_after_forward=True)
        handle = gw.attach(
            model, None, weights={"*": "randomshift:bits=8"}, options=gw.Options(keep=keep)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for step in range(4):
                loss = model(torch.ones(1)).sum()
                assert torch.isfinite(loss)
                loss.backward()
                optimizer.step()
                table = exact(model)["table"]
                found = gathered(model)
                assert not unlike(found)
                assert low == -1e4 or torch.equal(found["mask"], mask), (low, step)
                assert not torch.equal(found["table"], table), "others stay compressed"
                torch.testing.assert_close(found["table"], table, rtol=0, atol=0.05)
        # Of what does not change, differences are zero.
        unfit = low == -torch.inf or (low == LEAST and keep != "reference")
        said = [str(one.message) for one in warned if "uncompressed" in str(one.message)]
        assert len(said) == unfit, said
        assert all("gather mask uncompressed" in one for one in said)
        assert ("or near the largest float: mask" in str(handle)) == unfit


@on(2, "payload", "reference")
def test_values_that_no_codec_holds_may_come_later(rank: int, keep: str) -> None:
    """By a load, into groups that are gathered ahead of others, and some of which is frozen."""
    model: Any = nn.Sequential(Masked(0.0), Masked(0.0), Masked(0.0))
    model[1].requires_grad_(False)
    by_layer(model)
    model.set_modules_to_forward_prefetch([model[0], model[1]])
    model[1].set_modules_to_forward_prefetch([model[2]])
    handle = gw.attach(
        model, None, weights={"*": "randomshift:bits=8"}, options=gw.Options(keep=keep)
    )
    state = handle.state_dict()

    def runs(*names: str) -> None:
        """Gathers masks and these as they are."""
        for _ in range(2):
            model(torch.ones(1)).sum().backward()
        found, wanted = gathered(model), exact(model)
        assert not unlike(found)
        for name in ("0.mask", "1.mask", "2.mask", *names):
            assert torch.equal(found[name], wanted[name]), name

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        runs()
        assert not warned
        low = Masked(-torch.inf).mask
        for module in model[1:]:
            shard = module.mask.to_local()
            shard.data.copy_(low[3 * rank :][: len(shard)])  # torch counts no change
        of = model[0].mask.device_mesh, model[0].mask.placements
        model[0].load_state_dict({"mask": distribute_tensor(low.detach(), *of)}, strict=False)
        model[2].table.to_local().data[0, 0] = torch.nan if rank == 0 else 1.0  # has diverged
        runs()
        assert "largest float: 0.mask, 1.mask, 2.mask, 2.table" in str(handle)
        handle.load_state_dict(state)  # has nothing of it
        runs()
        assert model(torch.ones(1)).isnan()
        model[2].table.to_local().data[0, 0] = 0.5
        runs("2.table")
        assert torch.isfinite(model(torch.ones(1))), "what is not finite does not last"
    said = [str(one.message) for one in warned if "uncompressed" in str(one.message)]
    named = [one.split("gather ")[1].split(" uncompressed")[0] for one in said]
    assert sorted(named) == ["0.mask", "1.mask", "2.mask, 2.table"]
