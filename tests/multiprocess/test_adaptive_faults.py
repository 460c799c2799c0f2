"""Ranks never disagree on a plan that a policy chooses: many switches under delays, and ranks that
are slow, killed or resumed while they decide."""

from __future__ import annotations

import hashlib
import os
import random
import time
from dataclasses import dataclass
from typing import Any

import pytest
from adaptive_model import model_of, on_all, steps
from sharded_model import dumped, loaded

import gradwire as gw
from gradwire.controllers import Budget, Layer, Policy
from gradwire.integrations.deciding import Decider
from gradwire.integrations.switch import Switch
from ranks import as_processes, caught

pytestmark = pytest.mark.multiprocess


@dataclass(frozen=True)
class Restless(Policy):
    """Any choice, another one at each decision."""

    seed: int = 0
    made: int = 0

    name = "restless"
    bounded = False

    def after(self, layers: Any) -> Restless:
        return Restless(self.seed, self.made + 1)

    def memory(self) -> dict[str, Any]:
        return {"made": self.made}

    def remembering(self, memory: Any) -> Restless:
        return Restless(self.seed, int(memory.get("made", 0)))

    def choose(self, layers: list[Layer], budget: Budget) -> list[int]:
        draw = random.Random(f"{self.seed} {self.made}")
        return [draw.randrange(len(one.methods)) for one in layers]


def delayed(rank: int, most: float) -> None:
    """Every table, and every preparation of a plan, takes up to so many seconds more, other ones on
    each rank."""
    draw = random.Random(rank)
    tables, prepare = Decider._tables, Switch._prepare

    def slow_tables(self: Any, window: Any) -> Any:
        time.sleep(draw.random() * most)
        return tables(self, window)

    def slow_prepare(self: Any, plan: Any) -> None:
        time.sleep(draw.random() * most)
        prepare(self, plan)

    Decider._tables, Switch._prepare = slow_tables, slow_prepare  # type: ignore[method-assign]


def digest(model: Any) -> str:
    found = hashlib.sha256()
    for p in model.parameters():
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()


def switches(rank: int, kind: str, codec: str, count: int) -> int:
    """Trains until the plan in force has changed so many times; returns in how many passes."""
    delayed(rank, 0.004)
    draw = random.Random(100 + rank)
    model = model_of(kind)
    often = gw.Replan(every=1, average=1, share=1.0, stale=None)
    how: dict[str, Any] = {"policy": Restless(), "replan": often}
    if "topk" in codec:
        how["error_feedback"] = True
    handle: Any = gw.attach(model, codec, **how)
    seen: list[tuple[int, list[str], str]] = []
    step = switched = 0
    while switched < count and step < 40 * count:
        steps(model, step, step + 1)
        step += 1
        seen.append((handle.plan.version, [str(p) for p in handle.plan.parameters], digest(model)))
        switched += step > 1 and seen[-1][1] != seen[-2][1]
        time.sleep(draw.random() * 0.004)
        if step % 50 == 0:  # else decisions queue up
            handle.adaptation._serial.wait()
        if step == count // 2:  # resumed, each rank from its own state, while others decide
            state = loaded(dumped(handle.state_dict()))
            handle.detach()
            handle = gw.attach(model, codec, **how)
            handle.load_state_dict(state)
            assert handle.adaptation.passes == state["policy"]["passes"]
    assert switched == count
    parts = on_all(seen)
    assert all(part == parts[0] for part in parts)
    return step


@pytest.mark.parametrize(
    ("kind", "ranks", "codec", "count"),
    [
        ("ddp", 2, "qsgd:bits=4", 40),
        ("fsdp2", 2, "qsgd:bits=4", 40),
        pytest.param("ddp", 3, "topk:density=0.05", 200, marks=pytest.mark.exhaustive),
        pytest.param("ddp", 3, "qsgd:bits=4", 1000, marks=pytest.mark.exhaustive),
        pytest.param("fsdp2", 4, "qsgd:bits=4", 1000, marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_never_disagree(kind: str, ranks: int, codec: str, count: int) -> None:
    as_processes(ranks, switches, kind, codec, count, deadline=900)


def is_slow(rank: int, kind: str) -> float:
    """Training goes on in the old plan while one rank makes its tables; then all adopt the new
    one."""
    tables = Decider._tables

    def slow(self: Any, window: Any) -> Any:
        time.sleep(1.0)
        return tables(self, window)

    if rank == 1:
        Decider._tables = slow  # type: ignore[method-assign]
    model = model_of(kind)
    once = gw.Replan(every=10_000, first=4, average=2, share=1.0, stale=None)
    handle: Any = gw.attach(model, policy="lgreco", replan=once)
    slowest, adopted = 0.0, None
    for step in range(2000):
        begun = time.perf_counter()
        steps(model, step, step + 1)
        slowest = max(slowest, (time.perf_counter() - begun) * (step > 3))
        if handle.plan.version and adopted is None:
            adopted = step
        if min(on_all(handle.plan.version)):
            break
        time.sleep(0.005)
    assert len(set(on_all(adopted))) == 1
    assert adopted is not None
    assert adopted > 20
    return slowest


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_slow_rank_delays_the_plan_and_not_training(kind: str) -> None:
    assert max(as_processes(3, is_slow, kind)) < 1.0


def dies(rank: int, kind: str, where: str) -> tuple[str, list[str]]:
    """A rank dies while it decides, or while it prepares what was decided: a named error."""

    def die(*_: Any) -> None:
        os._exit(1)

    if rank == 1 and where == "decides":
        Decider._tables = die  # type: ignore[assignment,method-assign]
    if rank == 1 and where == "prepares":
        Switch._prepare = die  # type: ignore[method-assign]
    model = model_of(kind)
    once = gw.Replan(every=10_000, first=4, average=2, share=1.0, stale=None)
    handle: Any = gw.attach(model, policy="lgreco", replan=once)
    uniform = {p.name: str(p) for p in handle.plan.parameters}

    def train() -> None:
        for step in range(10_000):
            steps(model, step, step + 1)
            time.sleep(0.002)

    error = caught(train)
    assert isinstance(error, Exception), "peers notice"
    assert {p.name: str(p) for p in handle.plan.parameters} == uniform
    assert handle.plan.version == 0
    return type(error).__name__, [str(error)]


@pytest.mark.parametrize(
    ("kind", "where"), [("ddp", "decides"), ("ddp", "prepares"), ("fsdp2", "decides")]
)
def test_a_rank_that_dies_while_it_decides_is_named(kind: str, where: str) -> None:
    ends = as_processes(3, dies, kind, where, timeout=20, expect_death=(1,))
    for name, (said,) in (ends[0], ends[2]):
        assert name == "TransportError", said
        assert "rank 1" in said


def resumes(rank: int, moment: str) -> None:
    """A state is saved on all ranks while some know of the new plan, and others do not."""
    tables, prepare = Decider._tables, Switch._prepare

    def slow_tables(self: Any, window: Any) -> Any:
        time.sleep(0.5 if rank == 1 else 0.0)
        return tables(self, window)

    def slow_prepare(self: Any, plan: Any) -> None:
        time.sleep(0.5 if rank == 1 else 0.0)
        prepare(self, plan)

    Decider._tables = slow_tables  # type: ignore[method-assign]
    Switch._prepare = slow_prepare  # type: ignore[method-assign]
    model = model_of("ddp")
    once = gw.Replan(every=10_000, first=4, average=2, share=1.0, stale=None)
    handle: Any = gw.attach(model, policy="lgreco", replan=once)
    steps(model, 0, 5)
    if moment == "prepares":
        while not handle.adaptation.history:  # noted before it asks for the update
            time.sleep(0.001)
    state = loaded(dumped(handle.state_dict()))
    assert len(set(on_all(str(state["parameters"])))) == 1
    handle.detach()
    again: Any = gw.attach(model, policy="lgreco", replan=once)
    again.load_state_dict(state)
    same = on_all([str(p) for p in again.plan.parameters])
    assert all(part == same[0] for part in same)
    steps(model, 5, 10)
    assert len(set(on_all(digest(model)))) == 1


@pytest.mark.parametrize("moment", ["decides", "prepares"])
def test_a_state_saved_while_ranks_decide_is_the_same_plan_on_all(moment: str) -> None:
    as_processes(2, resumes, moment)


def keeps_the_reference(rank: int, what: str) -> None:
    model = model_of("ddp")
    alpha = 1e-6 if what == "infeasible" else 1.0
    often = gw.Replan(every=4, average=2, share=1.0, alpha=alpha)
    codec = "powersgd:rank=4" if what == "singular" else "qsgd:bits=4"
    handle: Any = gw.attach(model, codec, policy="lgreco", replan=often)
    if what == "singular":  # rank-1 gradients: every rank has the error 0
        for layer in (model.module[0], model.module[2], model.module[4]):
            layer.scale = 0.0
    if what == "not finite":
        model.module[2].scale = float("inf")
    before = [str(p) for p in handle.plan.parameters]
    for step in range(400):
        steps(model, step, step + 1)
        if min(on_all(len(handle.adaptation.history))) > 1:
            break
        time.sleep(0.005)
    first, second = handle.adaptation.history[:2]
    expected = {
        "infeasible": "no plan is within",
        "not finite": "has an error that is not finite",
        "singular": "3 without a gradient as in the uniform plan",
    }
    assert expected[what] in first["line"]
    assert expected[what] in second["line"]
    assert [str(p) for p in handle.plan.parameters] == before
    assert first["changed"] == second["changed"] == 0


@pytest.mark.parametrize("what", ["infeasible", "not finite", "singular"])
def test_where_no_plan_can_be_chosen_the_reference_stays(what: str) -> None:
    as_processes(2, keeps_the_reference, what)
