"""Random switches of plans; GRADWIRE_STRESS=N multiplies the seeds of an exhaustive run."""

from __future__ import annotations

from itertools import product

import pytest

from products import EXHAUSTIVE, one_in
from stress import switches
from stress.programs import TIMES
from stress.switches import Run

pytestmark = pytest.mark.multiprocess


seeds = pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=EXHAUSTIVE) for n in range(1, 6 * TIMES))]
)


@seeds
@pytest.mark.parametrize(("ranks", "shm"), one_in(6, product([3, 2, 5], [False, True])))
def test_no_pass_has_two_plans(ranks: int, shm: bool, seed: int) -> None:
    run = Run.of(seed, ranks, steps=25, updates=3)
    found = switches.found_of(run, shm)
    assert switches.wrong(run, found) is None, run
    assert all(end.value.versions[-1] == 3 for end in found)


@seeds
@pytest.mark.parametrize(("ranks", "shm"), one_in(6, product([3, 2, 5], [True, False])))
def test_survivors_name_who_died(ranks: int, shm: bool, seed: int) -> None:
    run = Run.of(seed, ranks, steps=40, updates=6, kills=True)
    assert switches.wrong(run, switches.found_of(run, shm)) is None, run
