"""Starts a benchmark's ranks, and reads what rank 0 reports while they run.

A benchmark is a function that all ranks call in torch's default group: it returns rows, of which
those of rank 0 count, as does its progress (`measured`). `bench train` has a worker of its own, a
module that is started as `python -m WORKER CONFIG EVENTS`: the file with its configuration, and the
file to which rank 0 appends events, one JSON object per line, each with an `event`. An event
`network` changes the lab's network to its `net`, which the parent then writes to a file beside the
events (`change`); it is not passed on.

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
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch.distributed as dist

from gradwire.errors import GradwireError
from gradwire.planner.whole import write_whole
from gradwire_tools import lab
from gradwire_tools.bench.network.world import World
from gradwire_tools.bench.progress import progress, watched
from gradwire_tools.bench.rows import Row
from gradwire_tools.bench.rows import finite as finite
from gradwire_tools.lab import Network

T = TypeVar("T")

ANSWER = "network"  # a file beside the events: the network as it is now
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 5.0  # for the other ranks, once one has failed: their ends are reported too
_LAST_LINES = 15


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


def configured(kind: type[T], arguments: list[str]) -> tuple[T, Events]:
    """In a worker: its configuration, and its events, which only rank 0 writes."""
    config_file, events_file = arguments
    config = pickle.loads(Path(config_file).read_bytes())
    assert isinstance(config, kind)
    return config, Events(open(events_file if os.environ["RANK"] == "0" else os.devnull, "a"))


def change(emulated: lab.Lab, net: str, events_file: Path) -> None:
    """Do what an event `network` asks for, and answer."""
    emulated.change(Network.parse(net))
    write_whole(events_file.with_name(ANSWER), net)


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
    for event in events(__name__, partial(measure, *given), *where, remarks=True):
        if event["event"] == "rows":
            found = event["rows"]
        else:
            progress(event["what"], event["done"], event["total"])
    return found


def main(arguments: list[str]) -> None:
    """One rank: measure in a default group, and on rank 0 report."""
    measure, events = configured(partial, arguments)
    dist.init_process_group("gloo")
    with watched(partial(_report_progress, events)):
        events.write("rows", rows=measure())
    dist.barrier()
    dist.destroy_process_group()


def _report_progress(events: Events, what: str, done: int, total: int) -> None:
    events.write("progress", what=what, done=done, total=total)


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
        config: is pickled.
        per_node: ranks on each node.
        announce: is called with lines for people: what is emulated, and with `remarks` what the
            ranks have written to their standard output and error.

    Raises:
        WorkerError: a rank failed, or `timeout` seconds have passed.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-") as name, lab.Lab(nodes, net) as emulated:
        folder = Path(name)
        config_file, events_file = folder / "config", folder / "events.jsonl"
        config_file.write_bytes(pickle.dumps(config))
        events_file.touch()
        announce(emulated.describe())
        argv = [sys.executable, "-m", worker, str(config_file), str(events_file)]
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
