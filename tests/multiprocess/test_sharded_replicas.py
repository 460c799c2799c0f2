"""FSDP2 with replicas (HSDP): the hop between them is per parameter too."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from adaptive_model import MATRICES, OFTEN, methods, model_of, until_decided
from sharded_model import (
    Model,
    added,
    assert_as_asked,
    backward,
    batch,
    dumped,
    gradients,
    loaded,
    replicas_of_shards,
    replicated,
    same,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from ranks import on, refuses
from rooms.decide import tables
from training import alike, everywhere


@on(4, 2)
@on(6, 2, 3, exhaustive=True)
def test_what_is_owed_is_sent(rank: int, replicas: int) -> None:
    """Law 2: residuals of both hops are sent once the new plan has none; with two ways to
    average."""
    for sums in (False, True):
        plain, ours = replicas_of_shards(replicas), replicas_of_shards(replicas)
        if sums:
            for model in (plain, ours):
                model.set_force_sum_reduction_for_comms(True)
                model.set_gradient_divide_factor(3.0)
        handle = gw.attach(ours, "topk", density=0.1, error_feedback=True)
        total: dict[str, Any] = {}
        sent: dict[str, Any] = {}
        for step in range(4):
            if step == 2:
                handle.update(codec=None).wait(60)
                everywhere("prepared")
            added(total, backward(plain, step, spare=True))
            added(sent, backward(ours, step, spare=True))
        assert handle.plan.version == 1
        assert len(total) == 7
        for name, expected in total.items():
            torch.testing.assert_close(sent[name], expected, rtol=0, atol=1e-4)


@on(4)
def test_steps_without_the_hop(rank: int) -> None:
    """Without the hop in some steps, an option of FSDP2; and back to plain FSDP2."""
    plain, ours = replicas_of_shards(2), replicas_of_shards(2)
    handle = gw.attach(ours, "identity")
    for model in (plain, ours):
        model.zero_grad()
        for step in range(3):
            model.set_requires_all_reduce(step == 2)
            model(batch(step), spare=True).square().mean().backward()
    assert_as_asked(gradients(plain), gradients(ours), ())
    assert handle.stats()["calls"] == 3 * 3 + 3
    handle.detach()
    assert_as_asked(backward(plain, 3), backward(ours, 3), ())
    assert handle.stats()["calls"] == 3 * 3 + 3


@on(4)
def test_shards_without_values_switch(rank: int) -> None:
    """No all-reduce tells the ranks of the second shard which version replicas offer; and nothing
    is scattered to a single shard."""
    for replicas in (2, 4):
        row = torch.nn.Linear(30, 1, bias=False)
        ours = fully_shard(torch.nn.Sequential(row), mesh=replicated(replicas))
        handle = gw.attach(ours, include=["*"], bits=8)
        versions = []
        for step in range(4):
            if step == 1:
                handle.update(bits=2).wait(60)
                everywhere("prepared")
            ours(batch(step)).square().mean().backward()
            versions.append(handle.plan.version)
        assert versions == [0, 0, 1, 1], replicas


@on(4)
def test_a_policy_decides_for_all_replicas(rank: int) -> None:
    """From averages over all ranks; a failure on one rank leaves the plan in all replicas."""
    model = model_of("hsdp")
    how: dict[str, Any] = {"policy": "lgreco", "replan": OFTEN, "weights": "randomshift:bits=5"}
    handle: Any = gw.attach(model, "qsgd:bits=4", **how)
    summed: dict[str, torch.Tensor] = {}
    decided = handle.adaptation._window

    def window(kind: str) -> Any:
        made = decided(kind)
        if kind == "gradients" and not summed:
            summed.update(made.values)
        return made

    handle.adaptation._window = window
    until_decided(model, handle, 2, 1)
    chosen = [methods(handle), {p.name: str(p.weight) for p in handle.plan.parameters}]
    assert alike(chosen)
    assert len({chosen[0][name] for name in MATRICES}) > 1
    mine = [summed[name].tolist() for name in MATRICES]  # this rank's shards, in windows of all
    assert [of for i, of in enumerate(everywhere(mine)) if i % 2 == rank % 2] == [mine] * 2
    before, at = handle.plan.parameters, len(handle.adaptation.history)
    with pytest.MonkeyPatch.context() as monkey:
        if rank == 1:
            monkey.setattr(tables, "table", lambda *_: 1 / 0)
        until_decided(model, handle, at + 2, 1)
    assert handle.plan.parameters == before
    assert all("the plan stays" in row["line"] for row in handle.adaptation.history[at:])


@on(4)
def test_states_fit_the_mesh(rank: int) -> None:
    """In the same mesh resuming is bit-identical, from a rank's own state and from that of all; in
    another, residuals are refused."""
    how: dict[str, Any] = {"density": 0.1, "error_feedback": True}

    def made() -> tuple[Any, Any]:
        model = replicas_of_shards(2)
        return model, gw.attach(model, "topk", policy="lgreco", **how)

    model, handle = made()
    for step in range(2):
        backward(model, step, spare=True)
    state = loaded(dumped(handle.state_dict()))
    full, first = handle.full_state_dict(), handle.full_state_dict(rank0_only=True)
    assert [of["rank"] for of in full["ranks"]] == [0, 1, 2, 3]
    assert [of["rank"] for of in first.get("ranks", ())] == [0, 1, 2, 3] * (rank == 0)
    # On ranks 0 and 1 too, whose shards agree.
    unlike = partial(handle.full_state_dict, rank0_only=rank == 3)
    refuses("disagree on full_state_dict", unlike)
    went_on = [backward(model, step, spare=True) for step in (2, 3)]
    for saved in (state, full):
        again, resumed = made()
        resumed.load_state_dict(saved)
        for expected, step in zip(went_on, (2, 3), strict=True):
            for name, gradient in backward(again, step, spare=True).items():
                assert same(gradient, expected[name])
    del state["policy"]
    other = replicas_of_shards(1)
    flat = gw.attach(other, "topk", **how)
    ddp = gw.attach(DDP(Model()), "topk", **how)
    own = {key: value for key, value in ddp.state_dict().items() if key != "aggregators"}
    own = {**own, "rank": rank, "aggregators": state["aggregators"]}
    for said, into, changed in (
        ("4 ranks in 2 shards; this group has 4 in 4", flat, state),
        ("4 ranks in 2 shards; this group has 4 under DDP", ddp, state),
        ("4 ranks under DDP; this group has 4 in 2 shards", resumed, own),
        ("sharded in other dimensions", resumed, {**state, "dims": {"embedding": 1}}),
    ):
        refuses(said, partial(into.load_state_dict, changed))
    flat.load_state_dict({**state, "aggregators": {}})
