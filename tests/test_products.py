"""The samples of products that `make test` runs cover every value."""

from __future__ import annotations

from itertools import product

from products import in_turn


def test_values_of_the_second_axis_take_turns() -> None:
    cases = in_turn("abcd", [0, 1, 2])
    assert [case.values for case in cases] == list(product("abcd", [0, 1, 2]))
    kept = [case.values for case in cases if not case.marks]
    assert kept == [("a", 0), ("b", 1), ("c", 2), ("d", 0)]
