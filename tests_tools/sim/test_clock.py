"""The clock, shared cores, and threads."""

from __future__ import annotations

import pytest

from gradwire_tools.sim.clock import Clock, Cores, Thread


def ends_of(count: float, works: dict[str, tuple[float, float]]) -> dict[str, float]:
    """When each piece of work, given as (begin, seconds), ends on `count` cores."""
    clock = Clock()
    cores = Cores(clock, count)
    ends: dict[str, float] = {}
    for name, (begin, seconds) in works.items():
        clock.at(
            begin,
            lambda name=name, seconds=seconds: cores.work(
                seconds, lambda: ends.setdefault(name, clock.now)
            ),
        )
    clock.run()
    return ends


def test_callbacks_run_in_order_of_time_then_of_scheduling() -> None:
    clock = Clock()
    seen: list[str] = []
    clock.at(2.0, lambda: seen.append("late"))
    clock.at(1.0, lambda: seen.append("first"))
    clock.at(1.0, lambda: seen.append("second"))
    clock.run()
    assert seen == ["first", "second", "late"]
    assert clock.now == 2.0


def test_enough_cores_slow_no_thread() -> None:
    works = {"a": (0.0, 1.0), "b": (0.25, 2.0)}
    for count in (2, 3, float("inf")):
        assert ends_of(count, works) == pytest.approx({"a": 1.0, "b": 2.25})


def test_threads_share_cores_equally() -> None:
    # Alone for 1 s, then at half speed: b's 1 s takes 2, and a's last 2 s take 2 and 1.
    assert ends_of(1, {"a": (0.0, 3.0), "b": (1.0, 1.0)}) == pytest.approx({"b": 3.0, "a": 4.0})
    # Three on two cores go at 2/3 until the shortest has ended.
    ends = ends_of(2, {"a": (0.0, 2.0), "b": (0.0, 2.0), "c": (0.0, 1.0)})
    assert ends == pytest.approx({"c": 1.5, "a": 2.5, "b": 2.5})
    # Less than one core: a node that represents others gets its share.
    assert ends_of(0.5, {"a": (0.0, 1.0)}) == pytest.approx({"a": 2.0})


def test_work_that_ends_together_ends_once() -> None:
    works = {str(i): (0.0, 1.0) for i in range(50)}
    ends = ends_of(2, works)
    assert ends == pytest.approx(dict.fromkeys(works, 25.0))


@pytest.mark.parametrize("count", [1, float("inf")])
def test_a_thread_does_one_thing_at_a_time_and_its_own_first(count: float) -> None:
    clock = Clock()
    thread = Thread(Cores(clock, count))
    seen: list[tuple[str, float]] = []

    def note(name: str) -> None:
        seen.append((name, clock.now))
        if name == "a":
            thread.do_first(0.5, lambda: note("a's own"))

    thread.do(1.0, lambda: note("a"))
    thread.do(1.0, lambda: note("b"))
    clock.run()
    assert seen == [("a", 1.0), ("a's own", 1.5), ("b", 2.5)]
    assert thread.seconds == 2.5
