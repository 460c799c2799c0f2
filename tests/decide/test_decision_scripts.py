"""Scripts over a log of passes: what they read, in which order, and how their commands fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from played import Module

import gradwire as gw
from gradwire.planner import Plan
from rooms.decide import UNTIMED, NextWindow, Passes, Runner, Script, Tell, Use, tried


def newer(before: Plan) -> Plan:
    return replace(before, version=before.version + 1)


def test_each_pass_is_read_once_and_in_order_however_late_the_script_is() -> None:
    module, read = Module(lambda plan: 2.0), list[tuple[int, float]]()

    def script() -> Script:
        for count in (2, 3, 1):
            read.extend((one.number, one.seconds) for one in (yield Passes(count)))

    module.workers.held = True
    module.runner.start(script())
    module.train(4)
    assert read == []
    module.workers.let()
    assert read == [(1, 2.0), (2, 2.0)]
    module.workers.held = False
    module.train(6)
    assert read == [(number, 2.0) for number in range(1, 7)]


def test_a_window_is_waited_for() -> None:
    runner, read = Module().runner, list[Any]()

    def script() -> Script:
        for _ in range(2):
            one = yield NextWindow()
            read.append((one.number, one.window))

    runner.start(script())
    for window in (None, None, "first", None, "second", None):
        runner.begin(0, None, window)
    assert read == [(2, "first"), (4, "second")]


def test_of_several_scripts_that_of_the_earliest_pass_goes_first() -> None:
    """And an update holds up the others: so plans are requested in the same order on all ranks."""
    module, done = Module(), list[str]()

    def every(count: int, name: str) -> Script:
        while True:
            yield Passes(count)
            done.append(name)

    def updates() -> Script:
        yield Passes(5)
        done.append("asks")
        used = yield Use(newer)
        done.append(f"used in {used.number}")
        module.runner.start(starts())
        yield Passes(2)
        module.runner.stop(second)
        done.append("stops")

    def starts() -> Script:
        (one,) = yield Passes(1)
        done.append(f"started: {one.number}")

    module.runner.start(every(2, "2"))
    second = module.runner.start(every(3, "3"))
    module.runner.start(updates())
    module.train(13)
    assert done == [
        "2", "3", "2", "asks", "used in 6", "2", "3", "started: 7", "2", "stops", "2", "2",
    ]  # fmt: skip


def test_scripts_that_are_late_catch_up_in_the_order_of_passes() -> None:
    module, done = Module(), list[int]()

    def script(*counts: int) -> Script:
        for count in counts:
            done.append((yield Passes(count))[-1].number)

    module.workers.held = True
    for counts in ((5, 2), (3, 3), (4, 6)):
        module.runner.start(script(*counts))
    module.train(11)
    module.workers.let()
    assert done == [3, 4, 5, 6, 7, 10]


def test_what_follows_an_update_is_called_as_its_first_pass_has_ended() -> None:
    module, seen = Module(), list[tuple[int, int]]()

    def then() -> None:
        seen.append((module.runner.passes, module.plan.version))

    def script() -> Script:
        yield Passes(2)
        yield Use(newer, then)
        yield Use(newer, then)

    module.workers.held = True
    module.runner.start(script())
    module.train(5)  # the script has not asked yet
    module.workers.let()
    assert seen == []
    module.train(1)
    assert seen == []
    module.train(2)
    module.workers.let()
    module.train(2)
    assert seen == [(6, 1), (9, 2)]


def test_a_refused_update_raises_and_nothing_follows_it() -> None:
    error = gw.ConfigError("ranks requested different plans")
    module, seen = Module(refuses=lambda _: error), list[Any]()

    def script() -> Script:
        try:
            yield Use(newer, lambda: seen.append("then"))
        except gw.ConfigError as found:
            seen.append(found)
        (one,) = yield Passes(1)
        seen.append(one.number)

    module.runner.start(script())
    module.train(4)
    assert seen == [error, 1]
    assert module.plan.version == 1


def test_plans_take_turns_and_the_slowest_rank_counts() -> None:
    """The first passes of a turn are not timed, and neither are those before its plan is used."""
    log: list[int] = []

    def seconds(plan: Plan) -> float:
        log.append(plan.version)
        first = log.count(plan.version) <= UNTIMED
        return 99.0 if first else float(plan.version)

    def told(key: str, mine: Any) -> list[Any]:
        return [mine, [mine[0] + 10, mine[1] - 10]]

    module, found = Module(seconds, told), list[float]()

    def script() -> Script:
        found.extend((yield from tried("test", [newer, newer], 3, turns=2)))

    module.runner.start(script())
    module.train(60)
    # plan 0 is in force as versions 1 and 3, plan 1 as 2 and 4
    assert found == [2.0 + 10, 3.0]
    assert [log.count(version) for version in (1, 2, 3)] == [UNTIMED + 3] * 3


def test_what_fails_does_not_stop_what_follows(caplog: pytest.LogCaptureFixture) -> None:
    module, done = Module(), list[str]()

    def fails() -> Script:
        yield Passes(1)
        raise SystemExit

    def follows() -> Script:
        yield Passes(1)
        done.append((yield Tell("key", "told"))[0])

    module.runner.start(fails())
    module.runner.start(follows())
    module.train(2)
    assert done == ["told"]
    assert "background work failed" in caplog.text


def test_a_closed_runner_ends_its_scripts() -> None:
    module, ended = Module(), list[str]()

    def script(runner: Runner) -> Script:
        try:
            yield Passes(1)
            runner.close()
            yield Tell("key", 1)
            ended.append("told")
        except Exception:
            ended.append("caught")

    module.runner.start(script(module.runner))
    module.train(3)
    assert ended == []
