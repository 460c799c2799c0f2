"""What a byte of each bucket counts: by priority, by spans, and where nothing can be told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rooms.integrations import MOST, UNTIMED, PlanTurns, priorities, together


def test_the_last_bucket_counts_most() -> None:
    assert priorities([["c", "b"], ["a"]]) == {"c": 1.0, "b": 1.0, "a": 2.0}


def test_neighbouring_buckets_are_taken_together() -> None:
    wanted = dict.fromkeys("abcd")
    assert together([["d", "x"], ["y"], ["c", "b"], ["a"]], wanted) == [["d"], ["c", "b"], ["a"]]
    many = [[str(number)] for number in range(100)]
    found = together(many, dict.fromkeys(map(str, range(100))))
    assert len(found) == MOST
    assert [name for names in found for name in names] == [str(number) for number in range(100)]
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert together([["x"]], wanted) == []


def test_plans_take_turns() -> None:
    asked: list[int] = []
    ended: list[Any] = []

    def ask(number: int) -> int:
        asked.append(number)
        return 10 + len(asked)

    def at_once(work: Callable[[], None]) -> None:
        work()

    turns = PlanTurns(2, 2, 3, ask, at_once, ended.append)
    turns.next()
    passes = UNTIMED + 3
    for version in (11, 12, 13, 14):
        turns.passed(version - 1, -1.0)  # of the plan before: not counted
        for value in range(passes):
            assert not ended
            turns.passed(version, 100 * version + value)
    assert asked == [0, 1, 0, 1]
    first = [[100 * v + value for value in range(UNTIMED, passes)] for v in (11, 12, 13, 14)]
    assert ended == [[first[0] + first[2], first[1] + first[3]]]
    turns.passed(14, 0.0)  # nothing more is counted
    assert len(ended) == 1
