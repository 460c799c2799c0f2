"""A policy changes methods per parameter while training runs, under DDP and FSDP2."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scenario import (
    FOUR,
    MATRICES,
    OFTEN,
    methods,
    model_of,
    passes,
    unlike,
    until_decided,
)

import gradwire as gw
from gradwire.controllers import Policy
from ranks import caught, on, refuses
from rooms.decide import tables
from training import alike


@on(2, ("ddp", FOUR, True, True), ("fsdp2", "topk:density=0.05", True, False))
@on(3, ("fsdp2", "qsgd:bits=4", False, False))
@on(
    2,
    ("ddp", "qsgd:bits=4", False, False),
    ("ddp", "powersgd:rank=4", False, False),
    exhaustive=True,
)
@on(3, ("ddp", "topk:density=0.05", True, False), exhaustive=True)
def test_a_policy_changes_the_plan(
    rank: int, kind: str, codec: str, feedback: bool, mixed: bool
) -> None:
    model = model_of(kind)
    often = replace(OFTEN, policy=gw.controllers.LGreco(), mixed=mixed)
    handle: Any = gw.attach(model, codec, policy=often, error_feedback=feedback)
    uniform = handle.stats()["parameters"]
    until_decided(model, handle, 2, 1)
    found = methods(handle)
    assert alike(found)
    chosen = {found[name] for name in MATRICES}
    assert len(chosen) > 1, "gradients of other sizes get other methods"
    assert (len({one.partition(":")[0] for one in chosen}) > 1) == mixed
    assert all("none" in found[name] for name in found if name not in MATRICES)
    now = handle.stats()["parameters"]
    sent = [sum(of[n]["payload_bytes"] for n in MATRICES) for of in (uniform, now)]
    assert sent[1] < sent[0]
    (row, *_) = handle._reductions.adaptation.history
    assert row["pass"] == 4
    assert row["changed"] > 0
    assert "lgreco" in row["line"]
    assert not row["early"]
    assert row["planned_error"] is None
    assert row["error"] == row["uniform_error"] == pytest.approx(row["budget"])
    if kind == "ddp":
        assert not unlike(dict(model.named_parameters()))
    refuses("the policy lgreco changes", lambda: handle.update(bits=3))
    state, before = copy.deepcopy(handle.state_dict()), found
    handle.detach()
    again: Any = gw.attach(model, codec, policy=often, error_feedback=feedback)
    again.load_state_dict(state)
    assert methods(again) == before
    assert again._reductions.adaptation.passes == state["policy"]["passes"]
    passes(model, 500, 502)
    bad = {**state, "policy": {"passes": 3}}
    refuses("for 'policy'", lambda: again.load_state_dict(bad))


@on(2, "ddp")
@on(2, "fsdp2", exhaustive=True)
def test_a_stale_plan_is_renewed_before_its_period_ends(rank: int, kind: str) -> None:
    """Gradients of the first and the last layer change places after the first decision."""
    model = model_of(kind)
    seldom = gw.Replan(every=40, first=4, average=4, share=1.0)
    handle: Any = gw.attach(model, FOUR, policy=replace(seldom, policy=gw.controllers.LGreco()))
    until_decided(model, handle, 1, 1)
    layers = list(model.module if kind == "ddp" else model)
    layers[0].scale, layers[4].scale = layers[4].scale, layers[0].scale
    until_decided(model, handle, 2, 2)
    first, second = handle._reductions.adaptation.history[:2]
    assert second["early"]
    assert (second["pass"] - 4) % 8 == 0, "at one of the four checks"
    assert second["pass"] < 44
    assert "early, as the plan's error grew by" in second["line"]
    planned = second["planned_error"] / first["uniform_error"]
    assert planned <= 1.0
    assert second["error"] / second["uniform_error"] > 1.2 * planned
    assert alike([{**row, "seconds": 0} for row in handle._reductions.adaptation.history[:2]])


@on(2, ("qsgd:bits=4", "randomshift:bits=5", "none"), (None, "randomshift:bits=5", "payload"))
@on(3, (None, "qsgd:bits=4:rounding=nearest", "payload"), exhaustive=True)
def test_a_policy_chooses_bits_of_weights(
    rank: int, codec: str | None, weights: str, keep: str
) -> None:
    model = model_of("fsdp2")
    with torch.no_grad():
        for layer, scale in zip((model[0], model[2], model[4]), (30.0, 1.0, 0.03), strict=True):
            layer.weight.mul_(scale)
            layer.scale = 1.0 / scale
    kept = gw.Options(keep=keep)
    handle: Any = gw.attach(model, codec, policy=OFTEN, weights=weights, options=kept)
    until_decided(model, handle, 5 if codec else 2, 1)
    found = {p.name: str(p.weight) for p in handle.plan.parameters}
    assert alike(found)
    assert len({found[name] for name in MATRICES}) > 1, "weights of other sizes get other bits"
    assert all(found[name].lower().startswith(weights.split(":")[0]) for name in MATRICES)
    assert all(found[name] == "None" for name in found if name not in MATRICES)
    rows = [row for row in handle._reductions.adaptation.history if row["of"] == "weights"]
    assert rows[0]["changed"] > 0
    assert rows[0]["error"] == rows[0]["uniform_error"]
    later = next(row for row in rows if row["planned_error"] is not None)
    assert later["planned_error"] <= rows[0]["budget"]
    of = {row["of"] for row in handle._reductions.adaptation.history}
    assert ("gradients" in of) == (codec is not None)
    passes(model, 600, 602)
    assert not unlike({n: p.full_tensor() for n, p in model.named_parameters()})


def test_a_policy_goes_on_after_recover(rank: int) -> None:
    """With the choices around what `attach` was given, not around those that it has made."""
    model = model_of("fsdp2")
    handle: Any = gw.attach(model, "qsgd:bits=4", policy=OFTEN)
    until_decided(model, handle, 1, 1)
    found, before = methods(handle), handle._reductions.adaptation
    assert len({found[name] for name in MATRICES}) > 1
    history, passes = handle.history(), before.passes

    def stops(_: torch.Tensor) -> None:
        raise ValueError("stop")

    sent = model(torch.randn(16, 64))
    sent.register_hook(stops)
    assert "stop" in str(caught(sent.sum().backward))
    model.reset_iter_state()
    handle.recover()
    assert handle._reductions.adaptation is not before
    assert methods(handle) == found
    assert handle.history() == history
    assert alike(handle._reductions.adaptation.passes)
    assert handle._reductions.adaptation.passes >= passes
    count = len(history)
    until_decided(model, handle, count + 1, 0)
    assert handle._reductions.adaptation.history[count]["planned_error"] is not None, "it remembers"
    assert handle._reductions.adaptation.history[count]["uniform_error"] > 0


def test_a_policy_works_where_a_mesh_has_one_rank_in_a_dimension(rank: int) -> None:
    """The first groups of their handles differ, and they share another one."""
    how: dict[str, Any] = {"policy": OFTEN, "weights": "randomshift:bits=5"}
    for replicas in (2, 1, 2):
        model = model_of("hsdp", replicas=replicas)
        handle: Any = gw.attach(model, "qsgd:bits=4", **how)
        until_decided(model, handle, 1, 1)
        assert handle._reductions.adaptation.history[0]["changed"] > 0
        assert alike(methods(handle))
        handle.detach()


def test_weights_that_are_sent_as_differences_stay_as_they_are(rank: int) -> None:
    model = model_of("fsdp2")
    given = {"weights": "randomshift:bits=4", "options": gw.Options(keep="reference")}
    handle: Any = gw.attach(model, policy=OFTEN, **given)
    until_decided(model, handle, 2, 1)
    assert {row["of"] for row in handle._reductions.adaptation.history} == {"gradients"}
    handle.detach()
    said = 'with keep="reference" differences of weights are sent'
    refuses(said, lambda: gw.attach(model, None, policy="lgreco", **given))


@on(2, (1, "table", RuntimeError), (0, "choose", RuntimeError), (0, "choose", SystemExit))
def test_a_failure_on_one_rank_leaves_the_plan(
    rank: int, where: int, what: str, kind: type
) -> None:
    """A rank whose tables, or whose policy, fails: the plan stays on all ranks, and all know. So it
    does where errors are not finite (tests/controllers/test_policies.py has other reasons)."""

    def fails(*_: Any, **__: Any) -> Any:
        raise kind("not today")

    model = model_of("ddp")
    handle: Any = gw.attach(model, FOUR, policy=OFTEN)
    before = handle.plan.parameters
    with pytest.MonkeyPatch.context() as monkey:
        if rank == where:
            monkey.setattr(tables if what == "table" else gw.controllers.LGreco, what, fails)
        until_decided(model, handle, 2, 0)
    said = [f"rank {where}: {kind.__name__}: not today"] * 2
    if what == "table":
        model.module[2].scale = float("inf")
        until_decided(model, handle, 4, 0)
        said += ["has an error that is not finite"] * 2
        for row in handle._reductions.adaptation.history[2:]:
            assert row["budget"] is row["error"] is row["uniform_error"] is None  # as JSON has it
    assert handle.plan.parameters == before
    for told, row in zip(said, handle._reductions.adaptation.history, strict=True):
        assert told in row["line"]
        assert "the plan stays" in row["line"] or "finite" in told
        assert row["changed"] == 0


class Unnamed(Policy):
    pass


def test_bad_input_is_named(rank: int) -> None:
    lgreco, mixed = {"policy": "lgreco"}, {"policy": gw.Replan(mixed=True)}
    for said, given in (
        ("its class has no name", {"policy": Unnamed()}),
        ("no choices around", {"codec": "terngrad", **lgreco}),
        ("no choices around", {"codec": "qsgd:rounding=nearest", **lgreco}),
        ("several methods", {"codecs": {"0.weight": "qsgd:bits=2"}, **lgreco}),
        ("nothing is compressed", {"codec": None, **lgreco}),
        ("disagree", {"policy": gw.Replan(every=50 + rank)}),
        ("0.weight has no error feedback", {"codec": "qsgd:bits=4", **mixed}),
    ):
        refuses(said, lambda given=given: gw.attach(model_of("ddp"), **given))
    how = {"error_feedback": True, **mixed}
    refuses("mixed=True) is for DDP", lambda: gw.attach(model_of("fsdp2"), "qsgd:bits=4", **how))
    for wrong in ({"average": 600}, {"share": 0}, {"metric": "l1"}, {"mixed": 1}):
        refuses("Replan: ", lambda wrong=wrong: gw.Replan(**wrong))


def test_a_single_rank_has_nothing_to_decide(rank: int) -> None:
    mine, _ = dist.new_subgroups(1)
    model = model_of("ddp", mine)
    handle: Any = gw.attach(model, policy=replace(OFTEN, policy=gw.controllers.LGreco()))
    passes(model, 0, 6)
    assert handle._reductions.adaptation is None  # a single rank sends nothing
