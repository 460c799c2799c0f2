"""The thread pool of steps that may block."""

from __future__ import annotations

import threading

import pytest

from rooms.engine import Workers
from rooms.engine import workers as workers_module


def test_finish_waits_for_what_runs() -> None:
    """At exit a thread inside torch would abort the process."""
    workers, began, goes_on = Workers(), threading.Event(), threading.Event()
    done: list[int] = []

    def task() -> None:
        began.set()
        assert goes_on.wait(60)
        done.append(1)

    assert workers.finish(0.0), "there is no thread"
    workers.run(task)
    assert not workers.finish(0.0)
    assert began.wait(60)
    assert not workers.finish(0.0)
    goes_on.set()
    assert workers.finish(60)
    assert done == [1]
    workers.run(goes_on.wait)  # on the idle thread
    assert workers.finish(60)


def test_a_failing_task_is_logged_unless_the_process_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that is still prepared then may lose its threads: nobody waits for it."""

    def task() -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    assert not workers_module.ending()
    told = []
    for ends in (False, True):
        monkeypatch.setattr(workers_module, "ending", lambda ends=ends: ends)
        workers = Workers()
        workers.run(task)
        assert workers.finish(60)
        told.append(caplog.text.count("a task failed"))
    assert told == [1, 1]
