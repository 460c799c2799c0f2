"""Products of cases: `make test` runs a sample of each, `make test-all` runs all.

Where every pair of values must meet, `laws.drawing` draws the sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def in_turn(first: Iterable[Any], second: Sequence[Any]) -> list[Any]:
    """The product of two axes, for `parametrize`, where each case is expensive: `make test` runs
    each value of the first with one of the second, in rotation."""
    return [
        pytest.param(a, b, marks=[EXHAUSTIVE] if (j - i) % len(second) else [])
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]
