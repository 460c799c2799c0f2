"""`make gpu-check`: checks that target triton is correct on this GPU, and measures its speed.

    PYTHONPATH=src python3 scripts/gpu_check.py [--output FILE] [--workers N] [--only NAME,...]

Needs torch, Triton and numpy, but no pytest and no network; takes minutes. In this order:

1. same bytes: every codec, dtype and form against target c on the CPU (eager without a compiler),
   each in its own process, since compiling dominates and a fault then ends one process only;
2. the other checks of tests/gpu/gpu_checks.py;
3. `bench kernels --device cuda`, over 256 MB, against a copy in the same run; on an idle GPU.

At the end it prints `NEXT`, commands that train a large model on this GPU.

Rows go to bench/results/DATE-DEVICE.jsonl as they are made, each with date, commit, device and
versions. Exit code: 0 if all checks pass, 1 if one fails, 2 if nothing can be checked; a line says
why.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "gpu")]
# What `gradwire bench train` is given, to train on a GPU (docs/laboratory/benchmarks.md).
_GPT = "--task gpt-124m --device cuda --nodes 4 --net none --steps 1000 --pause 500 --resume"
NEXT = (
    f"{_GPT} --methods torch-fp32,qsgd:bits=4,powersgd:rank=8 --json gpt-124m.jsonl",
    f"{_GPT} --sharded --methods qsdp:w=8:g=8 --json gpt-124m-sharded.jsonl",
)
CHECK_SECONDS = 330.0  # for the first part: checks that have not ended by then have failed
BENCH_SECONDS = 120.0  # codecs that have not begun by then are skipped, and reported


def main() -> int:
    """Run checks and measurements; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="bench/results/DATE-DEVICE.jsonl by default")
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--only", help="codecs by the names of their classes, such as QSGD,TopK")
    arguments = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(f"gpu-check: nothing can be checked: {reason}")
        print_next()
        return 2
    only = arguments.only.split(",") if arguments.only else None
    number, failed, begin = 0, 0, time.monotonic()
    stamp = provenance()
    output = arguments.output or ROOT / "bench" / "results" / name_of(stamp)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", buffering=1) as file:
        for row in itertools.chain(checks(arguments.workers, only), measurements(only)):
            file.write(json.dumps(row | stamp) + "\n")
            number += 1
            failed += not row.get("passed", True)
            print(line(row), flush=True)
    print(f"{number} rows in {output}; {failed} checks failed; {time.monotonic() - begin:.0f} s")
    print_next()
    return 1 if failed else 0


def print_next() -> None:
    """What to run on a GPU after the checks."""
    print("Next, each until it ends, within 10 minutes a time; they need typer, rich and pyyaml:")
    for words in NEXT:
        print(f"  PYTHONPATH=src python3 -m gradwire bench train {words}")


def line(row: dict[str, Any]) -> str:
    """A row, as it is printed."""
    if "check" not in row:
        return f"     {row['codec']}  {row['target']}  {row['op']}  of_limit {row['of_limit']:.3f}"
    verdict = "ok  " if row["passed"] else "FAIL"
    return f"{verdict} {row['seconds']:6.1f} s  {row['check']}  {row['subject']}  {row['detail']}"


def missing() -> str | None:
    """Why nothing can be checked here, or None."""
    absent = [name for name in ("torch", "triton", "numpy") if not importlib.util.find_spec(name)]
    if absent:
        return f"{', '.join(absent)} not installed"
    import gpu_checks

    return gpu_checks.missing()


def provenance() -> dict[str, Any]:
    """The fields of every row that identify the run."""
    import torch
    import triton

    git = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = os.environ.get("GRADWIRE_COMMIT", "unknown")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def name_of(stamp: dict[str, Any]) -> str:
    """The name of the results file."""
    device = re.sub(r"[^a-z0-9]+", "-", stamp["device"].lower()).strip("-")
    return f"{stamp['date']}-{device}.jsonl"


# checks ------------------------------------------------------------------------------------------


def checks(workers: int, only: list[str] | None) -> Iterator[dict[str, Any]]:
    """One row per check. Each check runs in its own process."""
    import gpu_checks

    wanted = [
        number for number, (codec, _) in enumerate(gpu_checks.CASES)
        if only is None or type(codec).__name__ in only
    ]  # fmt: skip
    context = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + CHECK_SECONDS
    with context.Pool(workers, maxtasksperchild=1) as pool:  # its exit ends running checks
        asked = [(case_name(n), pool.apply_async(run_case, (n,))) for n in wanted]
        asked += [(("other", name), pool.apply_async(run_other, (name,)))
                  for name in ([] if only else possible())]  # fmt: skip
        asked += [(("compiles what is measured", name), pool.apply_async(warm, (name,)))
                  for name in bench_names(only)]  # fmt: skip
        while asked:
            late = time.monotonic() > deadline
            ended = [a for a in asked if late or a[1].ready()]
            asked = [a for a in asked if a not in ended]
            for (check, subject), result in ended:
                wrong, seconds = "the check or its process did not end in time", CHECK_SECONDS
                if result.ready():
                    wrong, seconds = result.get()
                yield {
                    "check": check, "subject": subject, "passed": not wrong, "detail": wrong,
                    "seconds": round(seconds, 2),
                }  # fmt: skip
            time.sleep(0.05)


def possible() -> list[str]:
    """The names of the other checks that can run here; prints the skipped ones."""
    import gpu_checks

    lacking = {name: why() for name, why in gpu_checks.LACKING.items()}
    for name, reason in lacking.items():
        if reason is not None:
            print(f"     other  {name}  is skipped: {reason}", flush=True)
    return [name for name in gpu_checks.OTHERS if lacking.get(name) is None]


def case_name(number: int) -> tuple[str, str]:
    """(check, subject) of a case."""
    import gpu_checks

    codec, dtype = gpu_checks.CASES[number]
    return "same bytes", f"{codec!r} {str(dtype).removeprefix('torch.')}"


def run_case(number: int) -> tuple[str, float]:
    """(what is wrong, seconds) of a case."""
    import gpu_checks

    return timed(lambda: gpu_checks.same_bytes(*gpu_checks.CASES[number]))


def run_other(name: str) -> tuple[str, float]:
    """(what is wrong, seconds) of one of the other checks."""
    import gpu_checks

    return timed(gpu_checks.OTHERS[name])


def warm(name: str) -> tuple[str, float]:
    """Compile the kernels of the measurements into the shared cache on disk."""
    return timed(lambda: "" if list(bench(name, numel=2**16, quick=True)) else "no rows")


def timed(check: Callable[[], str]) -> tuple[str, float]:
    import torch

    torch.set_num_threads(1)
    begin = time.monotonic()
    try:
        wrong = check()
    except Exception:
        wrong = "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
    return wrong, time.monotonic() - begin


# measurements ------------------------------------------------------------------------------------


def bench_names(only: list[str] | None) -> list[str]:
    """The codecs to measure, with default options; those with matrices run on the CPU."""
    import torch

    from gradwire import codecs
    from gradwire.lang import forms
    from gradwire.lang.layout import native_name

    names = []
    for name in codecs.REGISTRY:
        codec = codecs.get(codec=name)
        fused = forms.derive(codec, native_name(torch.float32)).fused
        if fused and (only is None or type(codec).__name__ in only):
            names.append(name)
    return names


def bench(name: str, numel: int | None = None, quick: bool = False) -> Iterator[dict[str, Any]]:
    """The rows of one codec."""
    from gradwire_tools.bench.micro import kernels

    return kernels.run([name], None, numel, None, quick, "cuda")


def measurements(only: list[str] | None) -> Iterator[dict[str, Any]]:
    """One row per codec and op, in sequence."""
    deadline = time.monotonic() + BENCH_SECONDS
    for name in bench_names(only):
        if time.monotonic() > deadline:
            print(f"     {name} is not measured: out of time")
            continue
        try:
            yield from bench(name)
        except Exception as error:  # a check has reported it
            print(f"     {name} cannot be measured: {error}")


if __name__ == "__main__":
    sys.exit(main())
