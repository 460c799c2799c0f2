"""Starts a benchmark's ranks, and reads what rank 0 reports while they run.

A job is a function that all ranks call in torch's default group, each in a process of its own:
`python -m WORKER JOB EVENTS`, with the file of the pickled job, and the file to which rank 0
appends events, one JSON object per line, each with an `event`. An event `network` changes the lab's
network to its `net`, which the parent then writes to a file beside the events (`change`); it is not
passed on. Most jobs return rows, and those of rank 0 count, as does its progress (`measured`).

A rank that fails ends the run with its own last lines, and an interrupt ends all ranks in silence.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gradwire.errors import GradwireError
from gradwire.planner.files import write_whole
from gradwire_tools import lab
from gradwire_tools.bench.network.world import World
from gradwire_tools.bench.progress import progress, watched
from gradwire_tools.bench.rows import Row
from gradwire_tools.bench.rows import finite as finite
from gradwire_tools.lab import Network

WORKER = "gradwire_tools.bench.workers"
_ANSWER = "network"  # a file beside the events: the network as it is now
_CHANGE_SECONDS, _ANSWER_SECONDS = 30.0, 0.005  # at most, and between two looks
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 5.0  # for the other ranks, once one has failed: their ends are reported too
_LAST_LINES = 15


class WorkerError(GradwireError):
    """A rank failed, or the run took too long; the message ends with that rank's last output."""


class Events:
    """A rank's side. All methods do nothing on ranks but 0, which have no file."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def write(self, event: str, **fields: Any) -> None:
        """Append one event, as a JSON line, at once; numbers that JSON lacks become null."""
        if self._file is not None:
            with self._file.open("a") as stream:
                stream.write(json.dumps({"event": event, **finite(fields)}) + "\n")

    def change(self, net: str) -> None:
        """Have the parent change the lab's network, and wait until it has.

        Raises:
            GradwireError: the parent did not answer.
        """
        if self._file is None:
            return
        self.write("network", net=net)
        answer, deadline = self._file.with_name(_ANSWER), time.monotonic() + _CHANGE_SECONDS
        while not (answer.exists() and answer.read_text() == net):
            if time.monotonic() > deadline:
                raise GradwireError(f"the lab did not change to {net} within {_CHANGE_SECONDS:g} s")
            time.sleep(_ANSWER_SECONDS)


def change(emulated: lab.Lab, net: str, events_file: Path) -> None:
    """Do what an event `network` asks for, and answer."""
    emulated.change(Network.parse(net))
    write_whole(events_file.with_name(_ANSWER), net)


def measured(
    world: World, timeout: float, measure: Callable[..., list[Row]], *given: Any
) -> list[Row]:
    """The rows that all ranks measure: ranks that are started here, or torchrun's, of which this
    process is one.

    Args:
        timeout: seconds for ranks that are started here.
        measure: a module's function, which every rank calls with what is `given`.

    Raises:
        WorkerError: a rank failed, or `timeout` has passed.
        TransportError: torchrun's ranks cannot be joined.
    """
    if world.joins:
        with world.joined():
            return measure(*given)
    found: list[Row] = []
    remark = partial(print, file=sys.stderr, flush=True)
    where = world.nodes, world.network, timeout, remark, world.per_node
    for event in events(partial(_rows, partial(measure, *given)), *where, remarks=True):
        if event["event"] == "rows":
            found = event["rows"]
        else:
            progress(event["what"], event["done"], event["total"])
    return found


def _rows(measure: Callable[[], list[Row]], events: Events) -> None:
    def advance(what: str, done: int, total: int) -> None:
        events.write("progress", what=what, done=done, total=total)

    with watched(advance):
        events.write("rows", rows=measure())


def main(arguments: list[str]) -> None:
    """One rank: does the job in a default group."""
    job_file, events_file = map(Path, arguments)
    job, timeout = pickle.loads(job_file.read_bytes())
    dist.init_process_group("gloo", timeout=timeout)
    job(Events(events_file if dist.get_rank() == 0 else None))
    dist.barrier()
    dist.destroy_process_group()


def events(
    job: Callable[[Events], None],
    nodes: int,
    net: lab.Network | lab.Schedule,
    timeout: float,
    announce: Callable[[str], None],
    per_node: int = 1,
    remarks: bool = False,
    collective_timeout: timedelta | None = None,
) -> Iterator[dict[str, Any]]:
    """What rank 0 reports, in order; returns once all ranks have ended well.

    Args:
        job: is pickled.
        per_node: ranks on each node.
        collective_timeout: of the default group; None for torch's.
        announce: is called with lines for people: what is emulated, and with `remarks` what the
            ranks have written to their standard output and error.

    Raises:
        WorkerError: a rank failed, or `timeout` seconds have passed.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-") as name, lab.Lab(nodes, net) as emulated:
        folder = Path(name)
        job_file, events_file = folder / "job", folder / "events.jsonl"
        job_file.write_bytes(pickle.dumps((job, collective_timeout)))
        events_file.touch()
        announce(emulated.describe())
        argv = [sys.executable, "-m", WORKER, str(job_file), str(events_file)]
        processes, logs = [], []
        for rank, variables in enumerate(emulated.torchrun_env(per_node)):
            logs.append(folder / f"rank{rank}.log")
            with open(logs[rank], "wb") as log:
                environment = {**os.environ, **variables}
                node = rank // per_node
                processes.append(emulated.spawn(node, argv, environment, stdout=log, stderr=log))
        deadline = time.monotonic() + timeout
        with open(events_file) as stream:
            pending = ""
            while True:
                codes = [process.poll() for process in processes]  # first: no event is missed
                pending += stream.read()
                *lines, pending = pending.split("\n")
                for event in map(json.loads, lines):
                    if event["event"] == "network":
                        change(emulated, event["net"], events_file)
                    else:
                        yield event
                if all(code == 0 for code in codes):
                    break
                failed = next((rank for rank, code in enumerate(codes) if code), None)
                if failed is not None:
                    raise WorkerError(_report(failed, processes, logs))
                if time.monotonic() > deadline:
                    running = codes.index(None)
                    raise WorkerError(
                        f"the ranks did not end within {timeout:.0f} s\n"
                        + _last_lines(running, logs[running])
                    )
                time.sleep(_POLL_SECONDS)
        for rank, log_file in enumerate(logs if remarks else ()):
            for line in log_file.read_text(errors="replace").splitlines():
                announce(f"[rank {rank}] {line}")


def _report(first: int, processes: list[lab.NodeProcess], logs: list[Path]) -> str:
    """The rank that failed, with its last lines; the others' exit codes, once they have ended."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline and any(p.poll() is None for p in processes):
        time.sleep(_POLL_SECONDS)
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


if __name__ == "__main__":
    main(sys.argv[1:])
