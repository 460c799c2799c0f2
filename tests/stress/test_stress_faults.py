"""Faults in random programs: every rank ends with a named error, and nothing hangs."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from products import EXHAUSTIVE
from stress.faults import BOUND_S, BY_PROCESSES, BY_THREADS, SOON_S, kinds, run
from stress.programs import TIMES, Program

RANKS = (2, 3, 5)


def in_threads(seed: int, turn: int, bound: float) -> list[str | None]:
    return [
        run(kind, Program.of(seed, RANKS[(i + turn) % 3]), "threads", bound)
        for i, kind in enumerate(BY_THREADS)
    ]


def in_processes(
    turn: int, bound: float, chosen: Collection[str] = BY_PROCESSES
) -> list[str | None]:
    """Kinds over one of two transports."""
    turns = [("shm", "gloo")[(i + turn) % 2] for i in range(len(BY_PROCESSES))]
    return [
        run(kind, Program.of(11, 3), way if kind in kinds(way) else "gloo", bound)
        for kind, way in zip(BY_PROCESSES, turns, strict=True)
        if kind in chosen
    ]


@pytest.mark.parametrize(
    "seed", [10, *(pytest.param(n, marks=EXHAUSTIVE) for n in range(11, 20 * TIMES))]
)
def test_threads(seed: int) -> None:
    assert not any(wrong := in_threads(seed, seed, BOUND_S)), wrong


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("turn", "chosen"),
    [
        (0, ("scope", "destroy", "die")),
        *(pytest.param(turn, kinds("shm"), marks=EXHAUSTIVE) for turn in (0, 1)),
    ],
)
def test_processes(turn: int, chosen: Collection[str]) -> None:
    """But for dropped links: peers who only wait for the rank in the store, as it may happen on a
    busy machine, have no link that would tell them, and wait for the timeout."""
    assert not any(wrong := in_processes(turn, BOUND_S, chosen)), wrong


@pytest.mark.timing
@pytest.mark.multiprocess
def test_faults_are_told_soon() -> None:
    wrong = [said for turn in range(3) for said in in_threads(10, turn, SOON_S)]
    wrong += [said for turn in range(2) for said in in_processes(turn, SOON_S)]
    assert not any(wrong), wrong
