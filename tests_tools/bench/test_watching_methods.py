"""Methods of `bench train` that measure the network while they train."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from bench_runs import TINY, trained

from gradwire_tools.bench.train import method_run, methods
from gradwire_tools.bench.train.applied import Applied
from gradwire_tools.bench.train.method_run import MethodRun
from products import EXHAUSTIVE
from ranks import on

AUTO = "auto:trial=2"
FLEXIBLE = "flexible:seconds=0.3:steps=2:check=2:rest=100"
CONFIG = replace(TINY, methods=(AUTO, "torch-fp16-hook", FLEXIBLE), steps=36, evaluate_every=12)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "methods", [("torch-fp16-hook", FLEXIBLE), pytest.param((AUTO,), marks=EXHAUSTIVE)]
)
def test_what_they_decide_is_in_rows(methods: tuple[str, ...]) -> None:
    found = trained(replace(CONFIG, methods=methods))
    assert list(found.summaries) == list(methods)
    decided = [row for row in found.rows if row["row"] == "decision"]
    lines = {m: [row["line"] for row in decided if row["method"] == m] for m in methods}
    assert not lines.get("torch-fp16-hook")
    # What auto finds, and whether in time, depends on the machine.
    assert all("best" in one or "in use from now on" in one for one in lines.get(AUTO, ()))
    if FLEXIBLE in methods:
        assert "the start: tries 5 densities, 2 steps each" in lines[FLEXIBLE][0]
        assert "chooses" in lines[FLEXIBLE][1]
    name = methods[-1]
    first, *_, last = found.of(name)
    assert found.summaries[name]["steps"] == 36
    assert last["loss"] < 0.98 * first["loss"]
    assert [row["step"] for row in found.of(name)] == [0, 12, 24, 36]


def test_decisions_of_all_controllers_are_told_in_order() -> None:
    def told(*at: int, **more: Any) -> list[dict[str, Any]]:
        return [{"step": n, "line": f"{n}", "by": "auto", **more} for n in at]

    handle: Any = SimpleNamespace(history=lambda: [*told(2), *told(9, tried=[])])
    flexible: Any = SimpleNamespace(history=told(3, 5))
    applied = Applied(lambda steps: {}, handle=handle, flexible=flexible)
    of: Any = ("task", "model", "optimizer")
    found = MethodRun(methods.parse(FLEXIBLE), 0, *of, applied).decisions()
    assert [(row["step"], row["line"]) for row in found] == [(n, f"{n}") for n in (2, 3, 5, 9)]
    assert [row.get("tried") for row in found] == [None, None, None, []]


@on(2, exhaustive=True)
def test_flexible_resumes_whatever_density_was_in_force(rank: int) -> None:
    first = MethodRun.start(methods.parse(FLEXIBLE), CONFIG.check(), seed=0)
    first.train(6)
    decides = first.applied.flexible
    assert decides is not None
    update = decides._update(0.033, "art_tree")
    while not update.in_force:
        first.train(1)
    own = first.state()
    replicas = [{"trained": own.get("trained")}]
    assert any("0.033" in facts["codec"] for facts in own["method"]["parameters"].values())
    dist.broadcast_object_list(replicas)
    first.applied.remove()
    dist.barrier()
    second = MethodRun.start(methods.parse(FLEXIBLE), CONFIG.check(), seed=0)
    second.load(own, replicas[0])
    assert second.step == first.step
    second.train(6)
    assert all(p.isfinite().all() for p in second.model.parameters())
    second.applied.remove()
    dist.barrier()


class _Answers:
    """Of `Flexible`, whether steps are training."""

    def __init__(self, *answers: bool) -> None:
        self.step = iter(answers).__next__


class _Run(MethodRun):
    """Takes steps of 10 s on its own clock, and trains nothing."""

    taken = 0

    def one_step(self) -> None:
        self.taken += 1


def test_steps_that_are_thrown_away_take_time_and_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: Any = _Answers(True, False, False, True)
    applied = Applied(lambda steps: {}, flexible=answers, setup_seconds=5.0)
    of: Any = ("task", "model", "optimizer")
    run = _Run(methods.parse("flexible"), 0, *of, applied)
    clock = SimpleNamespace(perf_counter=lambda: 10.0 * run.taken)
    monkeypatch.setattr(method_run, "time", clock)
    run.train(2)
    assert (run.step, run.taken) == (2, 4)
    assert run.step_seconds == [15.0, 30.0]  # with what was measured before the first step
