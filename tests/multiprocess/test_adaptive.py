"""A policy changes methods per parameter while training runs, under DDP and FSDP2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from adaptive_model import MATRICES, OFTEN, model_of, on_all, steps, until_decided
from sharded_model import dumped, loaded

import gradwire as gw
from gradwire.integrations import deciding
from ranks import as_processes, caught

pytestmark = pytest.mark.multiprocess


def adapts(rank: int, kind: str, codec: str, feedback: bool, mixed: bool = False) -> None:
    model = model_of(kind)
    how = {"error_feedback": feedback, "replan": replace(OFTEN, mixed=mixed)}
    handle: Any = gw.attach(model, codec, policy=gw.LGreco(), **how)
    uniform = handle.stats()["parameters"]
    until_decided(model, handle, 2, 1)
    found = {p.name: str(p.inner) for p in handle.plan.parameters}
    assert len({str(one) for one in on_all(found)}) == 1
    chosen = {found[name] for name in MATRICES}
    assert len(chosen) > 1, "gradients of other sizes get other methods"
    assert (len({one.partition("(")[0] for one in chosen}) > 1) == mixed
    assert all("dense" in found[name] for name in found if name not in MATRICES)
    now = handle.stats()["parameters"]
    sent = [sum(of[n]["payload_bytes"] for n in MATRICES) for of in (uniform, now)]
    assert sent[1] < sent[0]
    (row, *_) = handle.adaptation.history
    assert row["pass"] == 4
    assert row["changed"] > 0
    assert "lgreco" in row["line"]
    assert not row["early"]
    assert row["planned_error"] is None
    assert row["error"] == row["uniform_error"] == pytest.approx(row["budget"])
    whole = {n: p.detach().double().sum() for n, p in model.named_parameters()}
    if kind == "ddp":
        assert len({str(one) for one in on_all(whole)}) == 1
    assert "the policy lgreco changes" in str(caught(lambda: handle.update(bits=3)))
    state, before = loaded(dumped(handle.state_dict())), found
    handle.detach()
    again: Any = gw.attach(model, codec, policy="lgreco", **how)
    again.load_state_dict(state)
    assert {p.name: str(p.inner) for p in again.plan.parameters} == before
    assert again.adaptation.passes == state["policy"]["passes"]
    steps(model, 500, 503)
    bad = caught(lambda: again.load_state_dict({**state, "policy": {"passes": 3}}))
    assert "for 'policy'" in str(bad)


@pytest.mark.parametrize(
    ("kind", "ranks", "codec", "feedback"),
    [
        ("ddp", 2, "qsgd:bits=4", False),
        ("ddp", 3, "topk:density=0.05", True),
        ("ddp", 2, "powersgd:rank=4", False),
        ("fsdp2", 3, "qsgd:bits=4", False),
        ("fsdp2", 2, "topk:density=0.05", True),
    ],
)
def test_a_policy_changes_the_plan(kind: str, ranks: int, codec: str, feedback: bool) -> None:
    as_processes(ranks, adapts, kind, codec, feedback)


def test_choices_of_several_families() -> None:
    as_processes(2, adapts, "ddp", "qsgd:bits=4", True, True)


def mixed_is_refused(rank: int) -> None:
    mixed = {"policy": "lgreco", "replan": gw.Replan(mixed=True)}
    bad = caught(lambda: gw.attach(model_of("ddp"), "qsgd:bits=4", **mixed))
    assert "0.weight has no error feedback" in str(bad)
    bad = caught(lambda: gw.attach(model_of("fsdp2"), "qsgd:bits=4", error_feedback=True, **mixed))
    assert "mixed=True) is for DDP" in str(bad)
    assert "mixed=1" in str(caught(lambda: gw.Replan(mixed=1)))


def test_mixed_choices_need_error_feedback_and_ddp() -> None:
    as_processes(2, mixed_is_refused)


def goes_stale(rank: int, kind: str) -> None:
    """Gradients of the first and the last layer change places after the first decision."""
    model = model_of(kind)
    seldom = gw.Replan(every=400, first=4, average=4, share=1.0)
    handle: Any = gw.attach(model, "qsgd:bits=4", policy=gw.LGreco(), replan=seldom)
    until_decided(model, handle, 1, 1, pause=0.01)
    layers = list(model.module if kind == "ddp" else model)
    layers[0].scale, layers[4].scale = layers[4].scale, layers[0].scale
    until_decided(model, handle, 2, 2)
    first, second = handle.adaptation.history[:2]
    assert second["early"]
    assert (second["pass"] - 4) % 80 == 0, "at one of the four checks"
    assert second["pass"] < 404
    assert "early, as the plan's error grew by" in second["line"]
    planned = second["planned_error"] / first["uniform_error"]
    assert planned <= 1.0
    assert second["error"] / second["uniform_error"] > 1.2 * planned
    rows = [[{**row, "seconds": 0} for row in of] for of in on_all(handle.adaptation.history[:2])]
    assert all(of == rows[0] for of in rows)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_stale_plan_is_renewed_before_its_period_ends(kind: str) -> None:
    as_processes(2, goes_stale, kind)


def remembers(rank: int, policy: str) -> None:
    """Norms stay as they are, so from the second decision on no layer is critical."""
    model = model_of("ddp")
    often = gw.Replan(every=8, average=4, share=1.0)
    handle: Any = gw.attach(model, "qsgd:bits=4", policy=policy, replan=often)
    until_decided(model, handle, 3, 1, pause=0.01)
    first, second, *_ = handle.adaptation.history
    assert not first["early"]
    assert first["changed"] == (0 if policy == "accordion" else 3)
    assert second["changed"] > 0
    assert second["error"] < handle.adaptation.history[2]["error"]
    state = loaded(dumped(handle.state_dict()))
    norms = state["policy"]["gradients"].get("memory", {}).get("norms", {})
    assert set(norms) == (set(MATRICES) if rank == 0 else set())
    before = {p.name: str(p.inner) for p in handle.plan.parameters}
    handle.detach()
    again: Any = gw.attach(model, "qsgd:bits=4", policy=policy, replan=often)
    again.load_state_dict(state)
    until_decided(model, again, 1, 0)
    if policy == "accordion":  # without its memory, all layers would be critical again
        assert again.adaptation.history[0]["changed"] == 0
        assert {p.name: str(p.inner) for p in again.plan.parameters} == before


@pytest.mark.parametrize("policy", ["accordion", "accordion-lgreco"])
def test_accordion_remembers_norms_between_decisions_and_in_a_state(policy: str) -> None:
    as_processes(2, remembers, policy)


def adapts_weights(rank: int, ranks: int, codec: str | None, weights: str, keep: str) -> None:
    model = model_of("fsdp2")
    with torch.no_grad():
        for layer, scale in zip((model[0], model[2], model[4]), (30.0, 1.0, 0.03), strict=True):
            layer.weight.mul_(scale)
            layer.scale = 1.0 / scale
    how: dict[str, Any] = {"weights": weights, "keep": keep, "replan": OFTEN}
    handle: Any = gw.attach(model, codec, policy="lgreco", **how)
    until_decided(model, handle, 5 if codec else 2, 1)
    found = {p.name: str(p.weight) for p in handle.plan.parameters}
    assert len({str(one) for one in on_all(found)}) == 1
    assert len({found[name] for name in MATRICES}) > 1, "weights of other sizes get other bits"
    assert all(found[name].lower().startswith(weights.split(":")[0]) for name in MATRICES)
    assert all(found[name] == "None" for name in found if name not in MATRICES)
    rows = [row for row in handle.adaptation.history if row["of"] == "weights"]
    assert rows[0]["changed"] > 0
    assert rows[0]["error"] == rows[0]["uniform_error"]
    later = next(row for row in rows if row["planned_error"] is not None)
    assert later["planned_error"] <= rows[0]["budget"]
    assert ("gradients" in {row["of"] for row in handle.adaptation.history}) == (codec is not None)
    steps(model, 600, 603)
    state = loaded(dumped(handle.state_dict()))
    before = handle.plan.parameters
    handle.detach()
    again: Any = gw.attach(model, codec, policy="lgreco", **how)
    again.load_state_dict(state)
    assert [p.weight for p in again.plan.parameters] == [p.weight for p in before]
    steps(model, 700, 703)
    parts = on_all({n: p.full_tensor().double().sum().item() for n, p in model.named_parameters()})
    assert all(part == parts[0] for part in parts)


@pytest.mark.parametrize(
    ("ranks", "codec", "weights", "keep"),
    [
        (2, "qsgd:bits=4", "randomshift:bits=5", "none"),
        (3, None, "qsgd:bits=4:rounding=nearest", "payload"),
    ],
)
def test_a_policy_chooses_bits_of_weights(
    ranks: int, codec: str | None, weights: str, keep: str
) -> None:
    as_processes(ranks, adapts_weights, ranks, codec, weights, keep)


def leaves_weights(rank: int) -> None:
    model = model_of("fsdp2")
    given = {"weights": "randomshift:bits=4", "keep": "reference"}
    handle: Any = gw.attach(model, policy="lgreco", replan=OFTEN, **given)
    until_decided(model, handle, 2, 1)
    assert {row["of"] for row in handle.adaptation.history} == {"gradients"}
    handle.detach()
    only = caught(lambda: gw.attach(model, None, policy="lgreco", **given))
    assert "nothing is compressed that it could choose" in str(only)


def test_weights_that_are_sent_as_differences_stay_as_they_are() -> None:
    as_processes(2, leaves_weights)


def fails(rank: int, where: int, what: str) -> None:
    """A rank whose tables, or whose policy, fails: the plan stays on all ranks, and all know."""

    class Broken(gw.LGreco):
        def choose(self, layers: Any, budget: Any) -> Any:
            raise RuntimeError("no choice today")

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no tables today")

    if what == "tables" and rank == where:
        deciding.table = broken  # type: ignore[assignment]
    model = model_of("ddp")
    policy = Broken() if what == "policy" else gw.LGreco()
    handle: Any = gw.attach(model, policy=policy, replan=OFTEN)
    before = handle.plan.parameters
    until_decided(model, handle, 2, 0)
    assert handle.plan.parameters == before
    for row in handle.adaptation.history:
        assert f"rank {where}: no" in row["line"]
        assert "the plan stays" in row["line"]
        assert row["changed"] == 0


@pytest.mark.parametrize(("where", "what"), [(1, "tables"), (0, "policy")])
def test_a_failure_on_one_rank_leaves_the_plan(where: int, what: str) -> None:
    as_processes(2, fails, where, what)


def refused(rank: int) -> None:
    def error(**arguments: Any) -> str:
        return str(caught(lambda: gw.attach(model_of("ddp"), **arguments)))

    assert "give a policy" in error(policy=3)
    assert "unknown policy 'greedy'" in error(policy="greedy")
    assert "give policy, too" in error(replan=OFTEN)
    assert "no choices around" in error(codec="terngrad", policy=gw.LGreco())
    assert "no choices around" in error(codec="qsgd:rounding=nearest", policy=gw.LGreco())
    assert "several methods" in error(codecs={"0.weight": "qsgd:bits=2"}, policy=gw.LGreco())
    assert "nothing is compressed" in error(codec=None, policy=gw.LGreco())
    different = gw.Replan(every=50 + rank)
    assert "disagree" in error(policy=gw.LGreco(), replan=different)
    for wrong in ({"every": 0}, {"average": 600}, {"share": 0}, {"metric": "l1"}, {"alpha": -1}):
        assert "Replan: " in str(caught(lambda wrong=wrong: gw.Replan(**wrong)))


def test_bad_input() -> None:
    as_processes(2, refused)


def alone(rank: int) -> None:
    model = model_of("ddp")
    handle: Any = gw.attach(model, policy=gw.LGreco(), replan=OFTEN)
    steps(model, 0, 12)
    assert handle.adaptation is None  # a single rank sends nothing


def test_a_single_rank_has_nothing_to_decide() -> None:
    as_processes(1, alone)
