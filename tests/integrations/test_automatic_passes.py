"""Automatic mode on ranks as threads: what it does at a pass, whenever the background is done."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.engine import Communicator
from gradwire.planner import Plan, Rules, make_plan
from gradwire.planner.links import Links
from gradwire_tools.sim import Curves
from ranks import as_threads
from rooms.engine import Workers
from rooms.integrations import (
    Adaptation,
    Automatic,
    Serial,
    Switch,
    WantedSetting,
    automatic,
    policy_of,
)

CODED = WantedSetting("qsgd:bits=4", rank=2, seconds=1.0)
HALF = WantedSetting("bf16", rank=1, seconds=1.0)
OTHER = WantedSetting("qsgd:bits=5", rank=3, seconds=1.0)
NAMED = [("weight", torch.zeros(32, 64)), ("bias", torch.zeros(64))]


def links(alpha: float) -> Links:
    return Links(((0, alpha), (alpha, 0)), ((0, 1e-8), (1e-8, 0)))


class Watch:
    """In place of a watch of the links, which change all the time."""

    def __init__(self, *_: Any) -> None:
        self._read = 0

    @property
    def newest(self) -> Links:
        self._read += 1
        return links(10.0**-self._read)

    def close(self) -> None:
        pass


class Trainer:
    """A rank's passes as `Reductions` makes them, without gradients.

    Attributes:
        submitted: the passes that gave the background work, one row for each.
        at: the pass that submitted what runs in the background.
    """

    def __init__(self, comm: Communicator, auto: gw.Auto, backward: float = 0.0) -> None:
        self.submitted: list[int] = []
        self.at = 0
        trains = threading.get_ident()
        self.adaptation: Adaptation | None = None
        _ = comm.topology  # as measuring the links makes it known
        owner = comm.owner("model")
        self.switch = Switch(
            make_plan(NAMED, Rules().changed(codec="bf16"), 2), [owner], lambda _: ()
        )

        def remade(plan: Plan, rules: Rules) -> Plan:
            return make_plan(NAMED, rules, 2, plan.options, plan.coalesce_bytes, plan.version)

        def start() -> None:
            if auto.policy is not None:
                self.adaptation = Adaptation(
                    policy_of(auto.policy), auto.replan, owner, self.switch, remade, lambda: None,
                    serial=self.auto.serial, name=f"policy {self.auto.passes}",
                )  # fmt: skip

        def stop() -> None:
            assert threading.get_ident() == trains  # averages of a pass are added to one policy
            self.adaptation = None

        def spent() -> tuple[float, float]:
            return self.auto.passes * backward, 0.0

        shapes = [(name, tuple(values.shape)) for name, values in NAMED]
        of = owner, self.switch, shapes, remade, spent, start, stop, lambda _: None
        self.auto = Automatic(auto, *of)
        submit = self.auto.serial.submit

        def noted(work: Callable[[], None]) -> None:
            at = self.auto.passes
            self.submitted.append(at)
            submit(lambda: self._run(at, work))

        self.auto.serial.submit = noted  # type: ignore[method-assign]

    def _run(self, at: int, work: Callable[[], None]) -> None:
        self.at = at
        work()

    def begin(self, least: int) -> int:
        self.auto.begin()
        if self.adaptation is not None:
            self.adaptation.begin(None)
        offered = self.switch.begin(least)
        if self.adaptation is not None:
            self.adaptation.add("weight", torch.ones(32, 64))
        return offered

    def idle(self) -> None:
        """Wait for the background."""
        self.auto.serial.wait()
        self.switch.change(lambda plan: plan)


def given(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured, and the planner's choice."""
    monkeypatch.setattr(automatic, "LinkWatch", Watch)
    monkeypatch.setattr(automatic, "measure_links", lambda *_: links(1e-3))
    monkeypatch.setattr(automatic, "costs", lambda _: Curves("none", 1, {}))
    monkeypatch.setattr(automatic, "plan", lambda *_: ([CODED, OTHER], "a plan of the test's"))


def changes(lines: Iterable[str]) -> int:
    return sum(line.startswith(("the links have changed", "passes take")) for line in lines)


@pytest.mark.parametrize("policy", [None, "lgreco"])
@pytest.mark.parametrize("trial", [0, 1])
def test_ranks_do_the_same_at_a_pass_however_late_the_background_of_one_is(
    policy: str | None, trial: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 begins a pass once its background is done; rank 1 learns what ranks tell each other
    only after its next pass has begun."""
    given(monkeypatch)
    seconds = iter(range(1 << 20))
    monkeypatch.setattr(automatic, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    told, passed, begun = Automatic._told, threading.Condition(), [0]
    trainers: dict[int, Trainer] = {}

    def late(self: Automatic, mine: Any) -> list[Any]:
        found = told(self, mine)
        if self._comm.rank == 1 and 1 in trainers:
            with passed:
                assert passed.wait_for(lambda: begun[0] > trainers[1].at, 30)
        return found

    monkeypatch.setattr(Automatic, "_told", late)
    both = threading.Barrier(2, timeout=30)
    offers: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    seen: dict[int, bool] = {}  # by pass: whether rank 0 has seen changes twice
    auto = gw.Auto(
        trial=trial, policy=policy, watch=1, replan=gw.Replan(every=1, average=1, share=1.0)
    )

    def body(comm: Communicator) -> tuple[list[int], list[str], set[bool]]:
        rank, policies = comm.rank, set()
        trainer = trainers[rank] = Trainer(comm, auto)
        both.wait()
        for number in itertools.count():
            if rank == 0:
                trainer.idle()
                seen[number] = changes(row["line"] for row in trainer.auto.history) > 1
            offers[number + 1][rank] = trainer.begin(min(offers[number]))
            policies.add(trainer.adaptation is not None)
            if rank == 1:
                with passed:
                    begun[0] += 1
                    passed.notify_all()
            both.wait()
            if seen[number]:
                break
        with passed:
            begun[0] += 1
            passed.notify_all()
        trainer.idle()
        return trainer.submitted, [row["line"] for row in trainer.auto.history], policies

    first, second = as_threads(2, body)
    assert first == second
    submitted, lines, policies = first
    assert changes(lines) > 1
    assert not any("has ended" in line for line in lines)
    assert len(submitted) > 10
    assert policies == ({False} if policy is None else {False, True})


def test_every_rank_says_that_automatic_mode_has_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: Automatic, mine: Any) -> list[Any]:
        raise gw.ConfigError("one of the test's")

    given(monkeypatch)

    def body(comm: Communicator) -> list[str]:
        trainer = Trainer(comm, gw.Auto())
        both.wait()
        monkeypatch.setattr(Automatic, "_told", fails)
        for _ in range(4):
            trainer.begin(0)
        trainer.idle()
        return [row["line"] for row in trainer.auto.history]

    both = threading.Barrier(2, timeout=30)
    line = "automatic mode has ended, the plan stays: one of the test's"
    assert as_threads(2, body) == [[line], [line]]
    said = {record.getMessage() for record in caplog.records}
    assert said == {f"rank {rank}: pass 4: auto: {line}" for rank in range(2)}


def test_the_plan_is_made_for_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch)
    seen = []

    def planned(*of: Any) -> Any:
        seen.append(of[5])
        return [CODED], "a plan of the test's"

    monkeypatch.setattr(automatic, "plan", planned)

    def body(comm: Communicator) -> None:
        trainer = Trainer(comm, gw.Auto(policy=None), backward=2.0 if comm.rank else 1.0)
        for _ in range(4):
            trainer.begin(0)
        trainer.idle()

    as_threads(2, body)
    assert seen == [2.0]


def test_a_warning_has_the_figures_that_were_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch)
    verdict = "bf16 is best: ... to take 2 ms; the best codec, qsgd, 3 ms"
    for plans, trial, why in (
        ([HALF], 8, "no other setting is close"),
        ([HALF, CODED], 0, "as planned"),
    ):
        monkeypatch.setattr(automatic, "plan", lambda *_, plans=plans: (plans, verdict))

        def body(comm: Communicator, trial: int = trial) -> str:
            trainer = Trainer(comm, gw.Auto(policy=None, trial=trial))
            for _ in range(4):
                trainer.begin(0)
            trainer.idle()
            return str(trainer.auto.history[-1]["line"])

        said = f"compression does not pay here; in use from now on: bf16 by sra ({why}: {verdict})"
        assert as_threads(2, body) == [said, said]


def test_what_fails_does_not_stop_what_follows() -> None:
    """Of the background work of a handle, one after the other."""
    serial, done = Serial(Workers()), []

    def fails() -> None:
        done.append("fails")
        raise SystemExit

    serial.submit(fails)
    serial.submit(lambda: done.append("follows"))
    serial.wait()
    assert done == ["fails", "follows"]
