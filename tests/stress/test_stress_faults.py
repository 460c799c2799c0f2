"""Faults in random programs: every rank soon ends with a named error, and nothing hangs."""

from __future__ import annotations

import pytest

from products import EXHAUSTIVE, in_turn
from stress import faults
from stress.faults import BY_PROCESSES, BY_THREADS, Fault
from stress.programs import Program

# Broken connections do not affect shared memory.
WAYS = [case for case in in_turn(BY_PROCESSES, (True, False)) if case.values != ("drop", True)]


@pytest.mark.parametrize("seed", [10, *(pytest.param(n, marks=EXHAUSTIVE) for n in range(11, 20))])
@pytest.mark.parametrize(("kind", "ranks"), in_turn(BY_THREADS, (2, 3, 5)))
def test_threads(kind: str, ranks: int, seed: int) -> None:
    program = Program.of(seed, ranks)
    fault = Fault.of(kind, program)
    found = faults.wrong(fault, faults.by_threads(fault, program))
    assert found is None, f"{fault}: {found}"


@pytest.mark.multiprocess
@pytest.mark.parametrize(("kind", "shm"), WAYS)
def test_processes(kind: str, shm: bool) -> None:
    program = Program.of(11, 3)
    fault = Fault.of(kind, program)
    found = faults.wrong(fault, faults.by_processes(fault, program, shm))
    assert found is None, f"{fault}: {found}"
