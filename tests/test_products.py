"""The samples of products that `make test` runs cover every value, and the promised pairs."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

from products import every_pair, in_turn


def kept(cases: list[Any]) -> list[tuple[Any, ...]]:
    return [case.values for case in cases if not case.marks]


def test_every_pair_meets_in_few_cases() -> None:
    for sizes in ((11, 5, 6), (22, 3, 7), (9, 3, 6, 2), (3, 4), (1, 1, 1)):
        letters = zip("abcd", sizes, strict=False)
        axes = [[f"{name}{i}" for i in range(size)] for name, size in letters]
        cases = every_pair(*axes)
        assert [case.values for case in cases] == list(product(*axes))
        met = {pair for case in kept(cases) for pair in combinations(case, 2)}
        assert met == {pair for a, b in combinations(axes, 2) for pair in product(a, b)}
        assert len(kept(cases)) == max(len(a) * len(b) for a, b in combinations(axes, 2))


def test_what_always_runs_counts_as_met() -> None:
    cases = every_pair(range(22), range(3), range(7), always=lambda a, b, c: b == 0)
    assert len(kept(cases)) == 22 * 7 + 22 * 2
    assert {(a, c) for a, b, c in kept(cases) if b == 0} == set(product(range(22), range(7)))


def test_values_of_the_second_axis_take_turns() -> None:
    assert kept(in_turn("abc", [0, 1])) == [("a", 0), ("b", 1), ("c", 0)]
    cases = in_turn("abc", [0, 1, 2], always=1)
    assert kept(cases) == [("a", 0), ("a", 1), ("b", 0), ("b", 2), ("c", 0), ("c", 1)]
    assert [case.values for case in cases] == list(product("abc", [0, 1, 2]))
