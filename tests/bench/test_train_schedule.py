"""`bench train` on a network that changes: steps take what the phase's network takes."""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradwire import lab
from gradwire.bench import scheduled, train
from gradwire.bench.scheduled import Follower
from gradwire.bench.train_config import TrainConfig
from gradwire.bench.workers import Events
from gradwire.errors import ConfigError, GradwireError

NET = "dip(step: 0 400mbit,1ms; 4 4mbit,1ms; 8 400mbit,1ms)"
TINY = TrainConfig(
    task="gpt",
    task_options={"layers": 1, "width": 32, "heads": 2, "validation_sequences": 16},
    nodes=2,
    net=NET,
    methods=("torch-fp32", "torch-fp16-hook"),
    steps=12,
    evaluate_every=2,
    ideal_steps=2,
    timeout_seconds=120,
)


class OneLab:
    """Stands for a lab: notes what it is changed to."""

    def __init__(self) -> None:
        self.nets: list[str] = []

    def change(self, net: lab.Network) -> None:
        self.nets.append(str(net))


def answer(file: Path, emulated: OneLab, wanted: int) -> None:
    """The parent: answers until it has changed `wanted` times."""
    done = 0
    while done < wanted:
        for line in file.read_text().splitlines()[done:]:
            scheduled.change(emulated, json.loads(line), file)  # type: ignore[arg-type]
            done += 1


@pytest.mark.parametrize(
    ("text", "nets"),
    [
        ("a(step: 0 1gbit,1ms; 3 1mbit,1ms)", ["1mbit,1ms"]),
        ("a(second: 0 1gbit,1ms; 1.5 1mbit,1ms; 3 2mbit,1ms)", ["1mbit,1ms", "2mbit,1ms"]),
        ("a(share: 0 1gbit,1ms; 0.5 1mbit,1ms)", ["1mbit,1ms"]),
        ("1gbit,1ms", []),
    ],
)
def test_rank_0_asks_and_waits(tmp_path: Path, text: str, nets: list[str]) -> None:
    file = tmp_path / "events"
    file.touch()
    emulated = OneLab()
    parent = threading.Thread(target=answer, args=(file, emulated, len(nets)))
    parent.start()
    with file.open("a") as stream:
        follower = Follower(lab.Schedule.parse(text), Events(stream).write, str(file))
        before = []
        for step in range(4):
            follower.follow(step, 4, [1.0] * step)
            before.append(list(emulated.nets))
    parent.join()
    assert before[-1] == nets
    assert before[1] == []


def test_other_ranks_do_nothing() -> None:
    schedule = lab.Schedule.parse(NET)
    Follower(schedule, lambda *_, **__: pytest.fail("asked"), None).follow(5, 12, [])


def test_a_parent_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduled, "_WAIT_SECONDS", 0.05)
    follower = Follower(lab.Schedule.parse(NET), lambda *_, **__: None, str(tmp_path / "events"))
    with pytest.raises(GradwireError, match="did not change to 4mbit,1ms"):
        follower.follow(4, 12, [])


@pytest.mark.multiprocess
def test_steps_are_as_slow_as_their_network() -> None:
    reason = lab.available()
    if reason is not None:
        pytest.skip(reason)
    rows: list[Any] = list(train.run(TINY, announce=lambda _: None))
    schedule = lab.Schedule.parse(NET)
    for method in TINY.methods:
        mine = [r for r in rows if r["row"] == "evaluation" and r["method"] == method]
        assert {(row["net"], row["schedule"]) for row in mine} == {("dip", schedule.spelled())}
        fast, slow = "400mbit,1ms", "4mbit,1ms"
        assert [row["net_now"] for row in mine] == [fast] * 3 + [slow] * 2 + [fast] * 2
        spent = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(mine)]
        wire = 2 * 8 * (mine[1]["wire_bytes"] / 2) / 4e6  # of two steps at 4 Mbit/s
        # Idle links may begin with a burst: 9 kB at both ends, a seventh of a step's bytes.
        assert min(spent[2:4]) >= 0.8 * wire
        # The first steps connect. After the dip, connections take some steps to be fast again.
        assert max(spent[1], spent[5]) < wire / 3
    summary = next(row for row in rows if row["row"] == "summary")
    assert (summary["net"], summary["schedule"]) == ("dip", schedule.spelled())


def test_composed_runs_train_on_one_network() -> None:
    with pytest.raises(ConfigError, match="leave the schedule out"):
        replace(TINY, nets=("1gbit,1ms",), interleaved=False).check()


def test_a_plan_holds_what_a_file_says(tmp_path: Path) -> None:
    file = tmp_path / "dip.yaml"
    file.write_text("by: step\nphases:\n  - {from: 0, net: '400mbit,1ms'}\n")
    assert train.plan(net=str(file)).net == "400mbit,1ms"
    file.write_text(file.read_text() + "  - {from: 4, net: '4mbit,1ms'}\n")
    assert train.plan(net=str(file)).net == "dip(step: 0 400mbit,1ms; 4 4mbit,1ms)"
