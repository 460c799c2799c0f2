"""Faults in random programs: every rank ends in a named error, soon, and nothing hangs."""

from __future__ import annotations

import pytest

from stress import faults
from stress.faults import BY_PROCESSES, BY_THREADS, Fault
from stress.programs import Program
from whole import whole

RANKS = (2, 3, 5)
# Broken connections do not stop what goes through shared memory.
ALL_WAYS = [
    (kind, shm) for kind in BY_PROCESSES for shm in (False, True) if (kind, shm) != ("drop", True)
]
SOME_WAYS = [
    ("raise", True),
    ("coroutine", False),
    ("call", False),
    ("scope", True),
    ("destroy", True),
    ("drop", False),
    ("die", False),
]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [(k, n) for i, k in enumerate(BY_THREADS) for n in (RANKS if whole() else RANKS[i % 3 :][:1])],
)
def test_threads(kind: str, ranks: int) -> None:
    for seed in range(10, 20 if whole() else 11):
        program = Program.of(seed, ranks)
        fault = Fault.of(kind, program)
        found = faults.wrong(fault, faults.by_threads(fault, program))
        assert found is None, f"seed {seed}, {fault}: {found}"


@pytest.mark.multiprocess
@pytest.mark.parametrize(("kind", "shm"), ALL_WAYS if whole() else SOME_WAYS)
def test_processes(kind: str, shm: bool) -> None:
    program = Program.of(11, 3)
    fault = Fault.of(kind, program)
    found = faults.wrong(fault, faults.by_processes(fault, program, shm))
    assert found is None, f"{fault}: {found}"
