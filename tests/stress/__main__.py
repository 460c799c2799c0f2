"""Random programs against their serial execution, for minutes: `python -m stress` in tests/.

Every seed is a program (programs.py), run with delays on every transport and number of ranks asked
for, and once serially for each number of ranks. A line tells of each run; one that differs, or ends
in an error, makes the exit status 1, and its line says how to see it again. With --faults something
goes wrong on one rank in every run (faults.py), and all ranks must end in named errors; a run then
counts as one step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from stress import faults
from stress.programs import Program
from stress.running import Found, difference, strayed
from stress.worlds import TRANSPORTS, by_processes, by_threads, serially

MOST_BY_PROCESSES = 3  # ranks


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m stress", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="of all runs together")
    parser.add_argument("--each", type=int, default=100, help="steps of one program in one run")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--ranks", default="2,3,5", help="5 as threads only")
    parser.add_argument("--transport", default="threads,gloo,shm", help=", ".join(TRANSPORTS))
    parser.add_argument("--minutes", type=float, default=20, help="begin no run afterwards")
    parser.add_argument("--faults", action="store_true", help="something goes wrong in every run")
    parser.add_argument("--json", metavar="FILE", help="a line for each run; - is standard output")
    given = parser.parse_args(arguments)
    transports = given.transport.split(",")
    unknown = set(transports) - set(TRANSPORTS)
    if unknown:
        parser.error(f"unknown transports: {', '.join(sorted(unknown))}")
    ranks = [int(n) for n in given.ranks.split(",")]

    torch.set_num_threads(1)  # ranks are threads enough
    end = time.monotonic() + 60 * given.minutes
    steps = failed = 0
    out = sys.stdout if given.json in (None, "-") else open(given.json, "w")  # noqa: SIM115
    seed = given.seed
    while steps < given.steps and time.monotonic() < end:
        each = (
            faulty(seed, ranks, transports)
            if given.faults
            else runs_of(seed, ranks, transports, given.each)
        )
        for row in each:
            steps += row["steps"]
            failed += row["wrong"] is not None
            print(json.dumps(row) if given.json else shown(row), file=out, flush=True)
        seed += 1
    if given.json != "-":
        print(f"{steps} steps of {seed - given.seed} programs, {failed} runs failed")
    if steps < given.steps:
        print(f"{given.minutes:g} minutes were over before {given.steps} steps", file=sys.stderr)
    return 1 if failed or steps < given.steps else 0


def runs_of(
    seed: int, ranks: Sequence[int], transports: Sequence[str], steps: int
) -> Iterator[dict[str, Any]]:
    """Run one seed's programs; a row for each run. Two runs at a time: they mostly sleep."""

    with ThreadPoolExecutor(2) as pool:
        begun = [
            (n, way, pool.submit(run, seed, n, way, steps))
            for n in ranks
            for way in ("serial", *ways(n, transports))
        ]
        expected: dict[int, Any] = {}
        for n, way, running in begun:
            seconds, found = running.result()
            if way == "serial":
                expected[n] = found
                wrong = found if isinstance(found, str) else strayed(Program.of(seed, n), found)
                if wrong is None:
                    continue
            else:
                wrong = compared(Program.of(seed, n), found, expected[n])
            yield {
                "seed": seed, "ranks": n, "transport": way, "seconds": round(seconds, 2),
                "steps": steps if way != "serial" else 0, "wrong": wrong,
            }  # fmt: skip


def ways(ranks: int, transports: Sequence[str]) -> list[str]:
    """Those of `transports` that so many ranks use."""
    return [t for t in transports if t in ("threads", "fifo") or ranks <= MOST_BY_PROCESSES]


def faulty(seed: int, ranks: Sequence[int], transports: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run one seed's programs with every kind of fault; a row for each run, of a step."""
    for n in ranks:
        program = Program.of(seed, n)
        for way in ways(n, [t for t in transports if t != "fifo"]):
            for kind in faults.BY_THREADS if way == "threads" else faults.BY_PROCESSES:
                if (kind, way) == ("drop", "shm"):
                    continue  # what goes through shared memory needs no connection
                begun, fault = time.monotonic(), faults.Fault.of(kind, program)
                try:
                    if way == "threads":
                        reports = faults.by_threads(fault, program)
                    else:
                        reports = faults.by_processes(fault, program, shm=way == "shm")
                    wrong = faults.wrong(fault, reports)
                except TimeoutError as error:
                    wrong = str(error)
                yield {
                    "seed": seed, "ranks": n, "transport": way, "fault": kind,
                    "seconds": round(time.monotonic() - begun, 2), "steps": 1, "wrong": wrong,
                }  # fmt: skip


def run(seed: int, ranks: int, way: str, steps: int) -> tuple[float, list[Found] | str]:
    """Seconds, and what each rank has; or what went wrong."""
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


def compared(program: Program, found: list[Found] | str, expected: list[Found] | str) -> str | None:
    """What is wrong with a run, or None."""
    if isinstance(found, str):
        return found
    if isinstance(expected, str):
        return "there is no serial execution to compare with"
    return difference(program, found, expected) or strayed(program, found)


def shown(row: dict[str, Any]) -> str:
    fault = f", {row['fault']}" if "fault" in row else ""
    text = f"seed {row['seed']}, {row['ranks']} ranks, {row['transport']}{fault}"
    text += f": {row['seconds']:.1f} s"
    if row["wrong"] is None:
        ended = "named errors" if fault else f"{row['steps']} steps, equal to the serial execution"
        return f"{text}, {ended}"
    way = row["transport"] if row["transport"] in TRANSPORTS else "threads"
    again = f"--seed {row['seed']} --ranks {row['ranks']} --transport {way} --steps 1"
    again += " --faults" if fault else f" --each {row['steps']}"
    return f"{text}, WRONG ({again}): {row['wrong']}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
