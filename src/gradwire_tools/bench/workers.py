"""Starts a benchmark's ranks on the lab's nodes, and reads what rank 0 reports while they run.

A worker is a module, started as `python -m WORKER CONFIG EVENTS` (its own arguments may follow its
name; `rank` is the worker of most benchmarks): the file with its configuration,
and the file to which rank 0 appends events, one JSON object per line, each with an `event`. Every
benchmark has `row` (`row`: a dict) and `progress` (`what`, `done`, `total`), or events of its own.
An event `network` (`scheduled`) changes the lab's network, and is not passed on.

A rank that fails ends the run with its own last lines, and an interrupt ends all ranks in silence.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

from gradwire.errors import GradwireError
from gradwire_tools import lab
from gradwire_tools.bench.train import scheduled

Row = dict[str, Any]
Advance = Callable[[str, int, int], None]  # what is measured, how much is done, of how much
T = TypeVar("T")

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 5.0  # for the other ranks, once one has failed: their ends are reported too
_LAST_LINES = 15


def unseen(what: str, done: int, total: int) -> None:
    """The `Advance` of what nobody watches."""


class WorkerError(GradwireError):
    """A rank failed, or the run took too long; the message ends with that rank's last output."""


class Events:
    """A worker's side: writes events as JSON lines; numbers that JSON lacks become null."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, event: str, **fields: Any) -> None:
        """Append one event, at once."""
        self._stream.write(json.dumps({"event": event, **finite(fields)}) + "\n")
        self._stream.flush()

    def rows(self, rows: list[Row]) -> None:
        """Append an event `row` for each."""
        for row in rows:
            self.write("row", row=row)

    def progress(self, what: str, done: int, total: int) -> None:
        """Append an event `progress`."""
        self.write("progress", what=what, done=done, total=total)


def finite(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of an event, None in place of a number that JSON lacks."""
    lacking = {k: None for k, v in fields.items() if isinstance(v, float) and not math.isfinite(v)}
    return {**fields, **lacking}


def configured(kind: Callable[..., T], arguments: list[str]) -> tuple[T, Events]:
    """In a worker: its configuration, a dataclass, and its events, which only rank 0 writes."""
    config_file, events_file = arguments
    fields = json.loads(Path(config_file).read_text())
    config = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    return config, Events(open(events_file if os.environ["RANK"] == "0" else os.devnull, "a"))


def rows(
    worker: str,
    config: Any,
    nodes: int,
    net: lab.Network | lab.Schedule,
    timeout: float,
    advance: Advance | None = None,
    per_node: int = 1,
) -> list[Row]:
    """Run a worker with a configuration (a dataclass); the rows that it reports.

    Args:
        timeout: seconds for all of it.
        advance: is called as the ranks make progress.
        per_node: ranks on each node.

    Raises:
        WorkerError: a rank failed, or `timeout` has passed.
    """
    found = []
    remark = partial(print, file=sys.stderr, flush=True)
    for event in events(worker, config, nodes, net, timeout, remark, per_node, remarks=True):
        if event["event"] == "row":
            found.append(event["row"])
        elif advance is not None:
            advance(event["what"], event["done"], event["total"])
    return found


def measured(
    config: Any,
    nodes: int,
    net: lab.Network,
    timeout: float,
    advance: Advance | None = None,
    per_node: int = 1,
) -> list[Row]:
    """As `rows`, of ranks that call `measure` of the module of the configuration's class."""
    worker = f"gradwire_tools.bench.rank {type(config).__module__}"
    return rows(worker, config, nodes, net, timeout, advance, per_node)


def events(
    worker: str,
    config: Any,
    nodes: int,
    net: lab.Network | lab.Schedule,
    timeout: float,
    announce: Callable[[str], None],
    per_node: int = 1,
    remarks: bool = False,
) -> Iterator[dict[str, Any]]:
    """What a worker reports, in order; returns once all ranks have ended well.

    Args:
        config: a dataclass.
        announce: is called with lines for people: what is emulated, and with `remarks` what the
            ranks have written to their standard output and error.

    Raises:
        WorkerError: a rank failed, or `timeout` seconds have passed.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-")))
        config_file, events_file = folder / "config.json", folder / "events.jsonl"
        config_file.write_text(json.dumps(dataclasses.asdict(config)))
        events_file.touch()
        argv = [sys.executable, "-m", *worker.split(), str(config_file), str(events_file)]
        emulated = stack.enter_context(lab.Lab(nodes, net))
        announce(emulated.describe())
        ranks = emulated.torchrun_env(per_node)
        logs = [folder / f"rank{rank}.log" for rank in range(len(ranks))]
        processes = []
        for rank, variables in enumerate(ranks):
            with open(logs[rank], "wb") as log:
                environment = {**os.environ, **variables}
                node = rank // per_node
                processes.append(emulated.spawn(node, argv, environment, stdout=log, stderr=log))
        deadline = time.monotonic() + timeout
        stream = stack.enter_context(open(events_file))
        pending = ""
        while True:
            codes = [process.poll() for process in processes]  # before reading: no event is missed
            pending += stream.read()
            *lines, pending = pending.split("\n")
            for event in map(json.loads, lines):
                if event["event"] == "network":
                    scheduled.change(emulated, event, events_file)
                else:
                    yield event
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                # The others' ends are reported, too.
                deadline = time.monotonic() + _GRACE_SECONDS
                while time.monotonic() < deadline and any(p.poll() is None for p in processes):
                    time.sleep(_POLL_SECONDS)
                raise WorkerError(_report(failed[0], processes, logs))
            if all(code == 0 for code in codes):
                break
            if time.monotonic() > deadline:
                running = next(rank for rank, code in enumerate(codes) if code is None)
                raise WorkerError(
                    f"the ranks did not end within {timeout:.0f} s\n"
                    + _last_lines(running, logs[running])
                )
            time.sleep(_POLL_SECONDS)
        for rank, log_file in enumerate(logs if remarks else ()):
            for line in log_file.read_text(errors="replace").splitlines():
                announce(f"[rank {rank}] {line}")


def _report(first: int, processes: list[lab.NodeProcess], logs: list[Path]) -> str:
    """The rank that failed, with its last lines; the others' exit codes."""
    codes = [process.poll() for process in processes]
    ends = ("was still running" if code is None else code for code in codes)
    outcomes = ", ".join(f"rank {rank} {end}" for rank, end in enumerate(ends))
    return (
        f"rank {first} failed with exit code {codes[first]} (exit codes: {outcomes})\n"
        + _last_lines(first, logs[first])
    )


def _last_lines(rank: int, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    return "\n".join(f"[rank {rank}] {line}" for line in lines or ["(it wrote nothing)"])
