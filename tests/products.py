"""Products of cases: `make test` runs a sample of each, `make test-all` runs all.

The sample covers every pair of values (`every_pair`); the rest of a product covers failures that
need three. Where a case is expensive, such as a compilation, the sample covers fewer pairs
(`in_turn`, `one_in`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

EXHAUSTIVE = pytest.mark.exhaustive


def one_in(n: int, values: Iterable[Any]) -> list[Any]:
    """For `parametrize`: `make test` runs the first value, and every n-th after it.

    A tuple has one value for each of several arguments.
    """
    rows = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*row, marks=[EXHAUSTIVE] if i % n else []) for i, row in enumerate(rows)]


def exhaustive(*values: Any) -> list[Any]:
    """For `parametrize`: values that `make test` skips; a tuple has one for each argument."""
    rows = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*row, marks=EXHAUSTIVE) for row in rows]


def in_turn(first: Iterable[Any], second: Sequence[Any], always: int = 0) -> list[Any]:
    """The product of two axes, for `parametrize`, where each case is expensive.

    `make test` runs each value of the first axis with the first `always` values of the second, and
    with one of the others in rotation.
    """
    turns = len(second) - always
    return [
        pytest.param(a, b, marks=[EXHAUSTIVE] if j >= always and (j - always - i) % turns else [])
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]


def every_pair(*axes: Iterable[Any], always: Callable[..., bool] | None = None) -> list[Any]:
    """The product of the axes, for `parametrize`; cases that `make test` skips are marked.

    `make test` runs the cases for which `always(*values)` is true, and as many others as are needed
    to cover every pair of values of two axes.
    """
    values = [list(axis) for axis in axes]
    cases = list(product(*(range(len(axis)) for axis in values)))
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    given = {case: [axis[at] for axis, at in zip(values, case, strict=True)] for case in cases}
    chosen = [case for case in cases if always is not None and always(*given[case])]
    met = set().union(*(pairs[case] for case in chosen))
    for new in range(len(axes) * (len(axes) - 1) // 2, 0, -1):  # those that add most come first
        for case in cases:
            if len(pairs[case] - met) >= new:
                chosen.append(case)
                met |= pairs[case]
    left_out = set(cases) - set(chosen)
    return [
        pytest.param(*given[case], marks=[EXHAUSTIVE] if case in left_out else []) for case in cases
    ]
