"""Starts the workers of `bench train` on the lab's nodes, and reads their events.

If a node fails, the run ends at once with an error that has the last lines of the node's output.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gradwire import lab
from gradwire.bench.train_config import TrainConfig
from gradwire.errors import GradwireError

WORKER = "gradwire.bench.train_worker"

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 5.0  # after a node has failed, for the others to end; their exit codes are shown
_LAST_LINES = 15


class TrainError(GradwireError):
    """A node failed, or the run took too long; the message ends with the node's last output."""


def events(
    config: TrainConfig, net: lab.Network, announce: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """The workers' events, in order; returns once all nodes have ended successfully."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-train-")))
        config_file, events_file = folder / "config.json", folder / "events.jsonl"
        config_file.write_text(config.to_json())
        events_file.touch()
        argv = [sys.executable, "-m", WORKER]
        argv += [str(config_file), str(events_file)]
        emulated = stack.enter_context(lab.Lab(config.nodes, net))
        announce(emulated.describe())
        logs = [folder / f"node{rank}.log" for rank in range(config.nodes)]
        processes = []
        for rank, variables in enumerate(emulated.torchrun_env()):
            with open(logs[rank], "wb") as log:
                environment = {**os.environ, **variables}
                process = emulated.spawn(rank, argv, environment, stdout=log, stderr=log)
            processes.append(process)
        deadline = time.monotonic() + config.timeout_seconds
        stream = stack.enter_context(open(events_file))
        pending = ""
        while True:
            codes = [process.poll() for process in processes]  # before read(), to miss no event
            pending += stream.read()
            *lines, pending = pending.split("\n")
            yield from (json.loads(line) for line in lines)
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                _await_all(processes)
                raise TrainError(_report(failed[0], processes, logs))
            if all(code == 0 for code in codes):
                return
            if time.monotonic() > deadline:
                running = next(rank for rank, code in enumerate(codes) if code is None)
                raise TrainError(
                    f"training did not end within {config.timeout_seconds:.0f} s\n"
                    + _last_lines(running, logs[running])
                )
            time.sleep(_POLL_SECONDS)


def _await_all(processes: list[lab.NodeProcess]) -> None:
    """Wait up to `_GRACE_SECONDS` for the other nodes of a failed run to end."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline and any(p.poll() is None for p in processes):
        time.sleep(_POLL_SECONDS)


def _report(first: int, processes: list[lab.NodeProcess], logs: list[Path]) -> str:
    """The failed node's last output, and the exit codes of all nodes."""
    outcomes = []
    for process in processes:
        code = process.poll()
        outcomes.append(f"node {process.rank} {'was still running' if code is None else code}")
    return (
        f"node {first} failed with exit code {processes[first].poll()} "
        f"(exit codes: {', '.join(outcomes)})\n" + _last_lines(first, logs[first])
    )


def _last_lines(rank: int, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    return "\n".join(f"[node {rank}] {line}" for line in lines or ["(no output)"])
