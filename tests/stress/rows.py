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
    rows = []
    _, expected = run(seed, n, "serial", steps)
    wrong = expected if isinstance(expected, str) else strayed(Program.of(seed, n), expected)
    if wrong is not None:
        return [row(seed, n, "serial", 0.0, wrong=wrong)]
    for way in ways(n, transports):
        seconds, found = run(seed, n, way, steps)
        wrong = compared(Program.of(seed, n), found, expected)
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
        for kind in faults.BY_THREADS if way == "threads" else faults.BY_PROCESSES:
            if (kind, way) == ("drop", "shm"):
                continue  # shared memory needs no connection
            begun, fault = time.monotonic(), faults.Fault.of(kind, program)
            try:
                if way == "threads":
                    reports = faults.by_threads(fault, program)
                else:
                    reports = faults.by_processes(fault, program, shm=way == "shm")
                wrong = faults.wrong(fault, reports, faults.SOON_S)
            except TimeoutError as error:
                wrong = str(error)
            seconds = time.monotonic() - begun
            rows.append(row(seed, n, way, seconds, fault=kind, steps=1, wrong=wrong))
    return rows


def run(seed: int, ranks: int, way: str, steps: int) -> tuple[float, list[Found] | str]:
    """Seconds, and each rank's results; or what went wrong."""
    program, begun = Program.of(seed, ranks), time.monotonic()
    found: list[Found] | str
    try:
        if way == "serial":
            found = serially(program, 0, steps)
        elif way in ("threads", "fifo"):
            found = by_threads(program, 0, steps, fifo=way == "fifo")
        else:
            found = by_processes(program, 0, steps, shm=way == "shm")
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    return time.monotonic() - begun, found


def compared(program: Program, found: list[Found] | str, expected: list[Found]) -> str | None:
    """What is wrong with a run, or None."""
    if isinstance(found, str):
        return found
    return difference(program, found, expected) or strayed(program, found)
