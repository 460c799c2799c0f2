"""The results of one program's runs: one row of plain values per run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from stress import faults
from stress.programs import Program
from stress.running import Found, difference, strayed
from stress.worlds import by_processes, by_threads, serially

MOST_BY_PROCESSES = 3  # ranks


def of_program(seed: int, n: int, transports: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """Run one seed's program with `n` ranks; a row for each run."""
    program, rows = Program.of(seed, n), []
    _, expected = run(program, "serial", steps)
    wrong = expected if isinstance(expected, str) else strayed(program, expected)
    if wrong is not None:
        return [row(seed, n, "serial", 0.0, wrong=wrong)]
    for way in ways(n, transports):
        seconds, found = run(program, way, steps)
        wrong = found if isinstance(found, str) else difference(program, found, expected)
        wrong = wrong or strayed(program, found)
        rows.append(row(seed, n, way, seconds, steps=steps, wrong=wrong))
    return rows


def row(seed: int, n: int, way: str, seconds: float, **more: Any) -> dict[str, Any]:
    how = {"seed": seed, "ranks": n, "transport": way, "seconds": round(seconds, 2), "steps": 0}
    return {**how, **more}


def ways(ranks: int, transports: Sequence[str]) -> list[str]:
    """The `transports` that support this number of ranks."""
    return [t for t in transports if t in ("threads", "fifo") or ranks <= MOST_BY_PROCESSES]


def faulty(seed: int, n: int, transports: Sequence[str]) -> list[dict[str, Any]]:
    """Run one seed's program with every kind of fault; a row for each run, of a step."""
    rows, program = [], Program.of(seed, n)
    for way in ways(n, [t for t in transports if t != "fifo"]):
        for kind in faults.kinds(way):
            begun = time.monotonic()
            wrong = faults.run(kind, program, way, faults.SOON_S)
            seconds = time.monotonic() - begun
            rows.append(row(seed, n, way, seconds, fault=kind, steps=1, wrong=wrong))
    return rows


def run(program: Program, way: str, steps: int) -> tuple[float, list[Found] | str]:
    """Seconds, and each rank's results; or what went wrong."""
    begun, deadline = time.monotonic(), 100.0 + 2 * steps
    found: list[Found] | str
    try:
        if way == "serial":
            found = serially(program, 0, steps, deadline)
        elif way in ("threads", "fifo"):
            found = by_threads(program, 0, steps, way == "fifo", deadline)
        else:
            found = by_processes(program, 0, steps, way == "shm", deadline)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    return time.monotonic() - begun, found
