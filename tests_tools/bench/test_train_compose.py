"""`bench train` on several networks. Composed rows: the formula of their times, scores as trained,
validation by whole runs. A network that changes: rank 0 asks, the parent changes the lab."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_runs import OPTIONS, TINY, trained

from forked import Loopback
from gradwire.errors import GradwireError
from gradwire_tools import lab
from gradwire_tools.bench import workers
from gradwire_tools.bench.train import run
from gradwire_tools.bench.train.config import TrainConfig
from gradwire_tools.bench.train.run import composed_seconds, step_time
from gradwire_tools.bench.train.worker import Training
from gradwire_tools.bench.workers import Events
from products import EXHAUSTIVE

WARM = "dgc:density=0.01:warmup=3:momentum=0"
LATE = "outer:every=4:delay=1:codec=none"
COMPOSED = replace(
    TINY, nets=("none",), methods=("torch-fp32", "torch-powersgd", WARM, LATE), steps=24,
    interleaved=False, timed_steps=8,  # the last of which begin behind 60 % of their run
)  # fmt: skip


def evaluations(*sent: int) -> list[dict[str, Any]]:
    return [{"step": 10 * turn, "wire_bytes": total} for turn, total in enumerate(sent)]


def timed(sent: float) -> dict[str, Any]:
    mean = {"step_seconds_mean": 0.5, "ideal_step_seconds": 0.1}
    return {**mean, "timed_bytes": sent, "wire_bytes": 11 * sent, "steps": 7}  # 4 steps' are dense


def composed(
    sent: list[dict[str, Any]], timed: dict[str, Any], late: dict[str, Any] | None = None
) -> list[float]:
    """On a network that stays."""
    times = {"none": step_time(timed, late)}
    return composed_seconds(sent, times, lab.Schedule.parse("none"), steps=10 * len(sent))


def test_composed_seconds() -> None:
    text = "fast then slow({}: 0 1gbit,1ms; {} 100mbit,1ms)".replace(" then ", "-")
    times = {"1gbit,1ms": lambda _: 0.5, "100mbit,1ms": lambda sent: 2.0 + 0.1 * (sent - 20)}
    sent = evaluations(0, 200, 420)  # 20 and 22 bytes a step
    of = {"share": (0.5, [0, 5.0, 27.0]), "step": (15, [0, 5.0, 5 * 0.5 + 5.0 + 5 * 2.2]),
          "second": (3.0, [0, 6 * 0.5 + 4 * 2.0, 11.0 + 22.0])}  # fmt: skip
    for unit, (start, expected) in of.items():
        schedule = lab.Schedule.parse(text.format(unit, start))
        assert composed_seconds(sent, times, schedule, 20) == pytest.approx(expected)
    # A method that sends always the same takes the measured time.
    assert composed(evaluations(0, 200, 400), timed(20)) == pytest.approx([0.0, 5.0, 10.0])
    # Communication scales with the bytes sent.
    # The first ten steps send three times as much: 0.1 s + 3 x 0.4 s each.
    assert composed(evaluations(0, 600, 800), timed(20)) == pytest.approx([0, 13.0, 18.0])
    # Times lie on the line through the first and the last steps.
    # 100 bytes take 0.5 s and 20 bytes 0.3 s: encoding takes time where nearly nothing is sent.
    late = {**timed(20), "step_seconds_mean": 0.3}
    sent = evaluations(0, 1000, 1600, 1800)
    assert composed(sent, timed(100), late) == pytest.approx([0.0, 5.0, 9.0, 12.0])
    # Points near each other make no line.
    late = {**timed(19), "step_seconds_mean": 0.9}
    assert composed(evaluations(0, 600), timed(20), late) == pytest.approx([0.0, 13.0])
    # Two dense steps of 500 bytes, then steps of 20: nearly all take the mean timed step.
    sent = evaluations(0, 2 * 500 + 8 * 20, *(1160 + 200 * turn for turn in range(1, 90)))
    for late in (None, timed(20)):
        seconds = composed(sent, timed(20), late)[-1]
        assert seconds == pytest.approx(898 * 0.5 + 2 * (0.1 + 25 * 0.4))
        assert seconds / 900 == pytest.approx(0.5, rel=0.1)


@pytest.mark.multiprocess
def test_composed_rows_have_the_scores_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[TrainConfig, list[dict[str, Any]]]] = []
    one = run.trained

    def noting(config: TrainConfig, *given: Any) -> Iterator[dict[str, Any]]:
        runs.append((config, list(one(config, *given))))
        return iter(runs[-1][1])

    monkeypatch.setattr(run, "trained", noting)
    found = trained(COMPOSED)
    alone = trained(replace(COMPOSED, nets=(), interleaved=True))
    assert found.losses == alone.losses
    assert list(found.summaries) == list(COMPOSED.methods)
    assert all(row["composed"] for row in found.rows)
    for method, row in found.summaries.items():
        last = found.of(method)[-1]
        assert last["step"] == COMPOSED.steps
        assert row["seconds"] == last["seconds"] > 0

    # The timed steps: all methods from the start, and those that send less later from where their
    # training has ended.
    (_, first), (late, last_rows) = runs[1:3]
    assert late.methods == ("torch-powersgd", WARM)
    started, ended = (
        {row["method"]: row for row in rows if row["row"] == "summary"}
        for rows in (first, last_rows)
    )
    begun = {row["method"]: row for row in last_rows if row.get("step") == COMPOSED.steps}
    assert {method: row["loss"] for method, row in begun.items()} == {
        method: alone.losses[method, 0, COMPOSED.steps] for method in late.methods
    }
    assert ended[WARM]["timed_steps"] == COMPOSED.timed_steps
    # The bytes of timed steps are without the dense first ones.
    sent = {
        row["step"]: row["wire_bytes"] for row in first
        if (row["row"], row["method"]) == ("evaluation", "torch-powersgd")
    }  # fmt: skip
    whole, (before, steps) = started["torch-powersgd"], sorted(sent)[-2:]
    assert whole["steps"] == steps == COMPOSED.skip_steps + COMPOSED.timed_steps
    assert whole["timed_steps"] == COMPOSED.timed_steps
    assert whole["timed_bytes"] == (sent[steps] - sent[before]) / (steps - before)
    assert whole["timed_bytes"] < whole["wire_bytes"] / steps / 1.2

    # Of replicas that meet, the first meeting opens connections, and an evaluation ends one early.
    late, rows = runs[3]
    assert late.methods == (LATE,)
    assert (late.skip_steps, late.timed_steps, late.evaluate_every) == (5, 8, 13)
    assert {row["step"] for row in rows if row["row"] == "evaluation"} == {0, 13}


def validation(*methods: str) -> list[dict[str, Any]]:
    config = replace(
        COMPOSED, task_options={**OPTIONS, "width": 128}, nets=("20mbit,1ms",), validate=True,
        steps=20, methods=methods,
    )  # fmt: skip
    return [row for row in trained(config).rows if row["row"] == "validation"]


@EXHAUSTIVE
@pytest.mark.multiprocess
@pytest.mark.lab
def test_composed_rows_are_validated_by_whole_runs() -> None:
    methods = ("torch-fp32", "gradwire-qsgd4")
    compared = validation(*methods)
    assert [row["method"] for row in compared] == list(methods)
    for row in compared:
        assert row["net"] == "20mbit,1ms"
        assert row["error"] == pytest.approx(row["composed_seconds"] / row["whole_seconds"] - 1)
        assert row["composed_final_loss"] == pytest.approx(row["whole_final_loss"], rel=1e-3)


@pytest.mark.multiprocess
@pytest.mark.lab
@pytest.mark.timing
def test_composed_times_are_those_of_a_whole_run() -> None:
    """Where the wire decides."""
    (row,) = validation("torch-fp32")
    assert abs(row["error"]) < 0.3


FAST, SLOW = "400mbit,1ms", "4mbit,1ms"
NET = f"dip(step: 0 {FAST}; 4 {SLOW}; 8 {FAST})"
SCHEDULED = replace(
    TINY, net=NET, methods=("torch-fp32", "torch-fp16-hook"), steps=12, evaluate_every=2
)


class OneLab(Loopback):
    """Notes what it is changed to, and emulates nothing."""

    nets: list[str]

    def change(self, net: lab.Network) -> None:
        self.nets.append(str(net))


def followed(net: str, steps: int, events: Events) -> Any:
    """What a `Training` has of its network, as it begins."""
    schedule = lab.Schedule.parse(net)
    return SimpleNamespace(schedule=schedule, net=schedule.first, steps=steps, events=events)


def test_rank_0_asks_and_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, nets in (
        ("a(step: 0 1gbit,1ms; 3 1mbit,1ms)", ["1mbit,1ms"]),
        ("a(second: 0 1gbit,1ms; 1.5 1mbit,1ms; 3 2mbit,1ms)", ["1mbit,1ms", "2mbit,1ms"]),
        ("a(share: 0 1gbit,1ms; 0.5 1mbit,1ms)", ["1mbit,1ms"]),
        ("1gbit,1ms", []),
    ):
        emulated: Any = OneLab(2)
        emulated.nets = []
        at_once = partial(workers.change, emulated, events_file=tmp_path / "events")
        events = Events(tmp_path / "events")
        monkeypatch.setattr(events, "write", lambda event, net, change=at_once: change(net))
        training = followed(text, 4, events)
        before = []
        for step in range(4):
            Training.follow(training, step, [1.0] * step)
            before.append(list(emulated.nets))
        assert before[-1] == nets
        assert before[1] == []
    Training.follow(followed(NET, 12, Events(None)), 5, [])  # rank 0 alone asks
    # A parent that does not answer: what it has written before is no answer.
    monkeypatch.setattr(workers, "_CHANGE_SECONDS", 0.05)
    assert (tmp_path / "network").exists()
    with pytest.raises(GradwireError, match=f"did not change to {SLOW}"):
        Training.follow(followed(NET, 12, Events(tmp_path / "events")), 4, [])


def one_lab(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs emulate nothing; the networks that they change to, as they do."""
    nets: list[str] = []

    def lab_of(nodes: int, net: Any) -> OneLab:
        made = OneLab(nodes)
        made.nets = nets
        return made

    monkeypatch.setattr(workers, "lab", SimpleNamespace(Lab=lab_of))
    return nets


@pytest.mark.multiprocess
def test_rows_tell_the_network_of_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    nets = one_lab(monkeypatch)
    found = trained(SCHEDULED)
    spelled = lab.Schedule.parse(NET).spelled()
    assert {(row["net"], row["schedule"]) for row in found.rows} == {("dip", spelled)}
    for method in SCHEDULED.methods:
        told = [row["net_now"] for row in found.of(method)]
        assert told == [FAST] * 3 + [SLOW] * 2 + [FAST] * 2
    assert nets == [SLOW, FAST] * (len(nets) // 2)
    assert nets


@pytest.mark.multiprocess
def test_methods_start_on_the_first_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the training before them ended on another: some measure it as they start."""
    nets, begun = one_lab(monkeypatch), []
    events = workers.events

    def noted(*given: Any, **options: Any) -> Iterator[dict[str, Any]]:
        for event in events(*given, **options):
            if event["event"] == "row" and not event["row"]["step"]:
                begun.append(list(nets))
            yield event

    monkeypatch.setattr(workers, "events", noted)
    drop = f"drop(step: 0 {FAST}; 2 {SLOW})"
    trained(replace(SCHEDULED, net=drop, methods=("torch-fp32",), seeds=(0, 1), steps=4))
    assert begun == [[], [SLOW, FAST]]


@pytest.mark.multiprocess
@pytest.mark.lab
@pytest.mark.timing
def test_steps_are_as_slow_as_their_network() -> None:
    found = trained(SCHEDULED)
    for method in SCHEDULED.methods:
        mine = found.of(method)
        spent = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(mine)]
        wire = 2 * 8 * (mine[1]["wire_bytes"] / 2) / 4e6  # of two steps at 4 Mbit/s
        # Idle links may begin with a burst: 9 kB at both ends, a seventh of a step's bytes.
        assert min(spent[2:4]) >= 0.8 * wire
        # The first steps connect. After the dip, connections take some steps to be fast again.
        assert max(spent[1], spent[5]) < wire / 3
