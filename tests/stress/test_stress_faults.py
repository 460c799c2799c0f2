"""Faults in random programs: every rank ends with a named error, and nothing hangs."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from products import EXHAUSTIVE
from stress import faults
from stress.faults import BOUND_S, BY_PROCESSES, BY_THREADS, SOON_S, Fault
from stress.programs import Program

RANKS = (2, 3, 5)
LINKED = [kind for kind in BY_PROCESSES if kind != "drop"]


def threads(seed: int, ranks: int, kind: str, bound: float) -> str | None:
    """What is wrong, or None."""
    program = Program.of(seed, ranks)
    fault = Fault.of(kind, program)
    found = faults.wrong(fault, faults.by_threads(fault, program), bound)
    return found and f"{fault}: {found}"


def processes(kind: str, shm: bool, bound: float) -> str | None:
    program = Program.of(11, 3)
    fault = Fault.of(kind, program)
    found = faults.wrong(fault, faults.by_processes(fault, program, shm), bound)
    return found and f"{fault}, shm={shm}: {found}"


def in_processes(turn: int, bound: float, chosen: Collection[str] = BY_PROCESSES) -> list[str]:
    """Kinds over one of two transports; broken connections do not affect shared memory."""
    kinds = [(kind, kind != "drop" and (i + turn) % 2 == 0) for i, kind in enumerate(BY_PROCESSES)]
    return [said for kind, shm in kinds if kind in chosen and (said := processes(kind, shm, bound))]


@pytest.mark.parametrize("seed", [10, *(pytest.param(n, marks=EXHAUSTIVE) for n in range(11, 20))])
def test_threads(seed: int) -> None:
    kinds = [(kind, RANKS[(i + seed) % 3]) for i, kind in enumerate(BY_THREADS)]
    wrong = [said for kind, ranks in kinds if (said := threads(seed, ranks, kind, BOUND_S))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("turn", "kinds"),
    [
        (0, ("scope", "destroy", "die")),
        *(pytest.param(turn, LINKED, marks=EXHAUSTIVE) for turn in (0, 1)),
    ],
)
def test_processes(turn: int, kinds: Collection[str]) -> None:
    """But for dropped links: peers who only wait for the rank in the store, as it may happen on a
    busy machine, have no link that would tell them, and wait for the timeout."""
    wrong = in_processes(turn, BOUND_S, kinds)
    assert not wrong, "\n".join(wrong)


@pytest.mark.timing
@pytest.mark.multiprocess
def test_faults_are_told_soon() -> None:
    wrong = [threads(10, ranks, kind, SOON_S) for kind in BY_THREADS for ranks in RANKS]
    wrong += [said for turn in range(2) for said in in_processes(turn, SOON_S)]
    assert not any(wrong), "\n".join(filter(None, wrong))
