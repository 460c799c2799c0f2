"""Where rows come from: every row of a benchmark carries `run`, what was run, where and when.

    command     as it was typed
    gradwire    its version
    commit      of the checkout that gradwire runs from, "+changes" if files differ from it; null
                outside of git
    machine     processor, cores, memory, system
    torch, python
    load        processes that ran or waited for a core, on average in the minute before
    date        when it began, UTC

Rows of several files can so be mixed, and each still says where it is from.
"""

from __future__ import annotations

import datetime
import functools
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec

import torch

import gradwire
from gradwire.planner import kernel_costs
from gradwire_tools.bench.rows import Row

P = ParamSpec("P")


def stamped(rows: Callable[P, Iterator[Row]]) -> Callable[P, Iterator[Row]]:
    """A function that yields rows, each with `run`."""

    @functools.wraps(rows)
    def made(*args: P.args, **kwargs: P.kwargs) -> Iterator[Row]:
        stamp = here()
        for row in rows(*args, **kwargs):
            yield {**row, "run": stamp}

    return made


def here() -> dict[str, Any]:
    """The value of `run`, now and on this machine."""
    return {
        "command": _command(),
        "gradwire": gradwire.__version__,
        "commit": _commit(),
        "machine": _machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": _load(),
        "date": now(),
    }


def now() -> str:
    """The date and the time, UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


@functools.cache
def _load() -> float:
    """Before this process measured anything: what it runs itself is no other load."""
    return round(os.getloadavg()[0], 2)


def _command() -> str:
    program = Path(sys.argv[0])
    # "gradwire" itself, or a file of the packages: python -m gradwire
    ours = program.name == "gradwire" or {"gradwire", "gradwire_tools"} & {*program.parts[-3:-1]}
    return shlex.join(["gradwire" if ours else program.name, *sys.argv[1:]])


@functools.cache
def _commit() -> str | None:
    package = Path(gradwire.__file__).resolve().parent
    found = _git(package, "rev-parse", "--show-toplevel", "HEAD")
    if found is None:
        return None
    top, commit = found.split("\n")
    if package != Path(top).resolve() / "src" / "gradwire":
        return None  # installed into an environment inside of somebody's own repository
    changed = _git(package, "status", "--porcelain", "--untracked-files=no")
    return commit[:12] + ("+changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    cores, system = len(os.sched_getaffinity(0)), f"{platform.system()} {platform.machine()}"
    parts = [kernel_costs.processor(), f"{cores} cores", f"{memory / 2**30:.0f} GiB"]
    return ", ".join([*parts, *device, system])
