"""`bench train` on a network that changes: rank 0 asks, the parent changes the lab, rows tell."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_runs import TINY, trained
from forked import Loopback

from gradwire.errors import GradwireError
from gradwire_tools import lab
from gradwire_tools.bench import workers
from gradwire_tools.bench.train.worker import Training
from gradwire_tools.bench.workers import Events

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
