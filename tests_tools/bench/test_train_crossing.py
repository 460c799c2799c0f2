"""`bench train` with cross_barrier: losses, and whose time late averages are in."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from bench_runs import OPTIONS, TINY, trained

from gradwire_tools.bench import tasks
from gradwire_tools.bench.train import methods
from gradwire_tools.bench.train.method_run import MethodRun
from gradwire_tools.bench.train.worker import Training
from gradwire_tools.lab import Schedule
from ranks import on
from rooms.handles import Awaited, cross_barrier

pytestmark = pytest.mark.multiprocess

METHODS = ("qsgd:bits=4:bucket_mb=0.01", "powersgd:rank=2:bucket_mb=0.01")
CROSSING = tuple(f"{name}:cross_barrier=true" for name in METHODS)


def test_losses_and_bytes_are_those_of_the_method_with_the_barrier() -> None:
    """Of methods that take turns, too, and with turns of one step."""
    both = (*METHODS, *CROSSING)
    for every, steps in ((3, 9), (1, 3)):
        found = trained(replace(TINY, methods=both, evaluate_every=every, steps=steps))
        for plain, crossing in zip(METHODS, CROSSING, strict=True):
            pairs = [*zip(found.of(plain), found.of(crossing), strict=True)]
            assert len(pairs) == 4
            for one, other in pairs:
                assert (one["loss"], one["wire_bytes"]) == (other["loss"], other["wire_bytes"])
                assert math.isfinite(one["loss"])


@on(2)
def test_what_is_late_ends_in_the_time_of_the_last_step(rank: int) -> None:
    """Before an evaluation, another method's turn, and another network."""

    def late() -> int:
        return sum(isinstance(p, Awaited) for p in run.model.parameters())

    task = tasks.get("gpt", **OPTIONS)
    run = MethodRun.start(methods.parse(CROSSING[0]), task, 0)
    at: list[tuple[int, int]] = []

    def follow(*_: Any) -> None:
        at.append((run.step, late()))

    nets = ["one", "one", "one", "one", "two", "two"]  # as the steps begin
    schedule = mock.Mock(spec=Schedule, at=lambda step, *_: nets[step])
    worker: Any = SimpleNamespace(
        schedule=schedule, net="one", steps=6, told_at=math.inf, follow=follow
    )
    with mock.patch.object(cross_barrier, "_is_there", return_value=False):
        run.train(3)
        assert late()
        before = sum(run.step_seconds)
        run.settle()
        assert late() == 0
        assert len(run.step_seconds) == 3
        assert sum(run.step_seconds) > before
        Training._step(worker, run, 6, 0)
        assert late() == 0
    (third, *_), (fourth, other), (fifth, _) = at
    assert (third, fourth, fifth, other) == (3, 4, 5, 0)
    worker.net = "two"
    with mock.patch.object(cross_barrier, "_is_there", return_value=False):
        nets += ["two"] * 2
        Training._step(worker, run, 8, 0)
    assert late() == 0
    assert at[-1] != (7, 0)  # nothing waits between two steps of one network
    run.applied.remove()
