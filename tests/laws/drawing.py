"""Random cases of many axes, drawn from a seed, that meet every pair of values."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

from products import EXHAUSTIVE

Case = dict[str, Any]


def drawn(
    axes: Mapping[str, Sequence[Any]],
    seed: int,
    apart: Collection[tuple[str, str]] = (),
    valid: Callable[[Case], bool] = lambda case: True,
    more: Callable[[Case], Case] = lambda case: {},
    pool: int = 800,
) -> list[Case]:
    """Cases in which every pair of values of two axes occurs: of a pool of random cases, always the
    one that adds most pairs.

    Args:
        apart: pairs of axes whose values need not meet.
        valid: whether a case can run.
        more: axes that follow from a case, whose values must meet those of other axes too.
    """
    draw = random.Random(seed)
    bits: dict[Any, int] = {}
    left_out = {frozenset(pair) for pair in apart}
    cases: list[tuple[Case, int]] = []  # the pairs as a set of bits
    while len(cases) < pool:
        case = {axis: draw.choice(values) for axis, values in axes.items()}
        if valid(case):
            pairs = 0
            for one, other in combinations({**case, **more(case)}.items(), 2):
                if frozenset((one[0], other[0])) not in left_out:
                    pairs |= 1 << bits.setdefault((one, other), len(bits))
            cases.append((case, pairs))
    left, chosen = (1 << len(bits)) - 1, []
    while left:
        case, pairs = max(cases, key=lambda c: (c[1] & left).bit_count())
        chosen.append(case)
        left &= ~pairs
    return chosen


def first(number: int, cases: Sequence[Case]) -> list[Any]:
    """For `parametrize`: `make test` runs the first of these, which meet most pairs of values, and
    as many of the others as have a value that is missing there; none if `number` is 0."""
    met: set[tuple[str, str]] = set()
    found = []
    for i, case in enumerate(cases):
        values = {(axis, str(value)) for axis, value in case.items()}
        chosen = i < number or (number > 0 and not values <= met)
        met |= values if chosen else set()
        found.append(pytest.param(case, marks=[] if chosen else [EXHAUSTIVE]))
    return found


def named(case: Case) -> str:
    """For `ids`."""
    return "-".join(str(value) for value in case.values())
