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
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count
from typing import Any

import torch

from stress.rows import faulty, of_program
from stress.worlds import TRANSPORTS

WIDTH = 3  # programs at once


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

    end = time.monotonic() + 60 * given.minutes
    steps = failed = 0
    out = sys.stdout if given.json in (None, "-") else open(given.json, "w")  # noqa: SIM115
    programs = ((seed, n) for seed in count(given.seed) for n in ranks)
    # Programs mostly sleep; but the time until ranks notice a fault is measured, on idle cores.
    width = 1 if given.faults else WIDTH
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(width, context, torch.set_num_threads, (1,)) as pool:
        running: set[Future[list[dict[str, Any]]]] = set()
        while running or (steps < given.steps and time.monotonic() < end):
            while len(running) < width and steps < given.steps and time.monotonic() < end:
                seed, n = next(programs)
                if given.faults:
                    running.add(pool.submit(faulty, seed, n, transports))
                else:
                    running.add(pool.submit(of_program, seed, n, transports, given.each))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for one in (one for future in done for one in future.result()):
                steps += one["steps"]
                failed += one["wrong"] is not None
                print(json.dumps(one) if given.json else shown(one), file=out, flush=True)
    if given.json != "-":
        print(f"{steps} steps, {failed} runs failed")
    if steps < given.steps:
        print(f"{given.minutes:g} minutes were over before {given.steps} steps", file=sys.stderr)
    return 1 if failed or steps < given.steps else 0


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
