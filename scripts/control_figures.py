"""The cost of a store and of the control channel at many ranks, for docs/internals/control.md.

    python scripts/control_figures.py --clients 1024

Clients are threads of two processes, with one connection each; a third process runs the store.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from typing import Any

import torch.distributed as dist

from gradwire.control import Channel, Member
from gradwire.control.connection import Connection

PROCESSES = 2
WATCH_S = 5.0
SLICE_S = 0.2


def serve(pipe: Pipe) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


class OneThread(Channel):
    """Has no thread: the one that drives the connections completes futures."""

    def post(self, action: Callable[[], None]) -> None:
        action()


class Hears:
    def __init__(self, heard: list[float]) -> None:
        self.heard = lambda sender, notice: heard.append(0.0)

    def tick(self) -> None:
        pass


def client(pipe: Pipe, port: int, first: int, count: int, clients: int) -> None:
    """Answer each command on `pipe` with the measurements of all threads."""
    raise_limit()
    base = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    stores: list[Any] = [None] * count
    connections: list[Connection] = []
    members: list[Member] = []
    heard: list[float] = []

    def all_threads(body: Callable[[int], Any]) -> list[Any]:
        found: list[Any] = [None] * count

        def run(i: int) -> None:
            found[i] = body(i)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        pipe.send("started")
        for thread in threads:
            thread.join()
        return found

    def clone(i: int) -> float:
        start = time.monotonic()
        stores[i] = base.clone()
        return time.monotonic() - start

    def wait(i: int) -> float:
        stores[i].wait(["go"], timedelta(seconds=60))
        return time.monotonic()

    def waits_in_slices(i: int) -> float:
        spent = []
        end = time.monotonic() + WATCH_S
        while time.monotonic() < end:
            start = time.monotonic()
            try:
                stores[i].wait(["never"], timedelta(seconds=SLICE_S))
            except RuntimeError:
                spent.append(time.monotonic() - start - SLICE_S)
        return statistics.median(spent)

    def reads_a_bell(i: int) -> float:
        spent = []
        end = time.monotonic() + WATCH_S
        while time.monotonic() < end:
            start = time.monotonic()
            stores[i].compare_set("bell", "?", "?")
            spent.append(time.monotonic() - start)
            time.sleep(SLICE_S)
        return statistics.median(spent)

    # One thread drives all channels of this process: real ranks do not share an interpreter.

    def turns(done: Callable[[], bool]) -> None:
        while not done():
            for connection in connections:
                connection.submit(lambda: None)  # so that it does not wait
                connection.turn()

    def join() -> list[float]:
        pipe.send("started")
        start = time.monotonic()
        group = dist.PrefixStore("group/", base)
        for i in range(count):
            connection = Connection(group, lambda: None)
            connection.connect()
            connections.append(connection)
            of = OneThread(), connection, group, first + i, clients, 300.0, Hears(heard)
            members.append(Member(*of))
        turns(lambda: all(member.part.settled for member in members))
        return [start, time.monotonic()]

    def agreement(key: str, lines: int) -> list[float]:
        description = [f"parameter {i}: qsgd(bits=4)" for i in range(lines)]
        pipe.send("started")
        start = time.monotonic()
        pending = [member.agree(key, "plan", description) for member in members]
        turns(lambda: all(future.done() for future in pending))
        return [start, time.monotonic()]

    def tell() -> list[float]:
        pipe.send("started")
        start = time.monotonic()
        if first == 0:
            members[0].tell({"raised": "RuntimeError"})
        turns(lambda: len(heard) == count - (first == 0))
        return [start, time.monotonic()]

    threaded = {
        "clone": clone,
        "wait": wait,
        "waits in slices": waits_in_slices,
        "reads a bell": reads_a_bell,
    }
    while True:
        turns(lambda: pipe.poll() or not connections)  # rank 0 accepts the others
        command = pipe.recv()
        if command is None:
            break
        name, *arguments = command
        if name in ("hello", "forget"):
            stores[:] = [None] * count
            pipe.send("started")
            pipe.send([])
        elif name in threaded:
            with quiet():
                pipe.send(all_threads(threaded[name]))
        else:
            pipe.send({"join": join, "agree": agreement, "tell": tell}[name](*arguments))
    for connection in connections:
        connection.stop()
        connection.turn()


def raise_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def quiet() -> Iterator[list[int]]:
    """Redirect standard error of C++ code to a file; on exit, append its number of lines."""
    lines: list[int] = []
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines.append(sum(1 for _ in file))


def one_connection(port: int) -> dict[str, float]:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    start = time.monotonic()
    for i in range(1000):
        store.compare_set(f"fresh {i}", "", "x")
    compare_set = time.monotonic() - start
    start = time.monotonic()
    for _ in range(1000):
        store.compare_set("missing", "?", "?")
    read = time.monotonic() - start
    over = []
    with quiet() as lines:
        for _ in range(20):
            start = time.monotonic()
            try:
                store.wait(["never"], timedelta(milliseconds=50))
            except RuntimeError:
                over.append(time.monotonic() - start - 0.05)
    return {
        "compare_set_ms_per_1000": compare_set * 1e3,
        "read_ms_per_1000": read * 1e3,
        "wait_run_out_ms": statistics.median(over) * 1e3,
        "wait_run_out_stderr_lines": lines[0] / 20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1024)
    parser.add_argument("--lines", type=int, default=1000, help="of the description agreed on")
    options = parser.parse_args()
    raise_limit()
    context = mp.get_context("spawn")
    pipe, other = context.Pipe()
    server = context.Process(target=serve, args=(other,))
    server.start()
    port = pipe.recv()
    per = options.clients // PROCESSES
    pipes, processes = [], []
    for i in range(PROCESSES):
        mine, theirs = context.Pipe()
        process = context.Process(target=client, args=(theirs, port, i * per, per, per * PROCESSES))
        process.start()
        pipes.append(mine)
        processes.append(process)

    def ask(*command: Any, between: Callable[[], Any] = lambda: None) -> tuple[Any, list[Any]]:
        for p in pipes:
            p.send(command)
        for p in pipes:
            assert p.recv() == "started"
        given = between()
        return given, [value for p in pipes for value in p.recv()]

    def report(name: str, **figures: float) -> None:
        rounded = {key: round(value, 3) for key, value in figures.items()}
        print(json.dumps({"figure": name, "clients": per * PROCESSES, **rounded}), flush=True)

    def costs(name: str, *command: Any) -> None:
        pids = [server.pid, *(p.pid for p in processes)]
        before = [cpu_seconds(pid) for pid in pids if pid]
        start = time.monotonic()
        _, spent = ask(*command)
        wall = time.monotonic() - start
        used = [cpu_seconds(pid) - b for pid, b in zip(pids, before, strict=True) if pid]
        extra = {"over_ms": statistics.median(spent) * 1e3} if spent else {}
        report(
            name,
            server_cores=used[0] / wall,
            client_ms_per_s=sum(used[1:]) / wall / (per * PROCESSES) * 1e3,
            **extra,
        )

    print(
        json.dumps(
            {"figure": "one connection"}
            | {key: round(value, 3) for key, value in one_connection(port).items()}
        ),
        flush=True,
    )
    ask("hello")
    start = time.monotonic()
    _, spent = ask("clone")
    report(
        "clones at once",
        all_s=time.monotonic() - start,
        median_ms=statistics.median(spent) * 1e3,
    )
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

    def go() -> float:
        time.sleep(1.0)
        store.set("go", "")
        return time.monotonic()

    at, woken = ask("wait", between=go)
    woken = sorted(w - at for w in woken)
    report("set wakes waits", median_ms=statistics.median(woken) * 1e3, last_ms=woken[-1] * 1e3)
    costs("idle: waits of 0.2 s that run out", "waits in slices")
    costs("idle: a bell read every 0.2 s", "reads a bell")
    ask("forget")
    for name, *command in (
        ["join", "join"],
        *(["agree", "agree", f"plan {run}", options.lines] for run in range(3)),
        ["tell", "tell"],
    ):
        before = cpu_seconds(server.pid or 0)
        _, times = ask(*command)
        used = cpu_seconds(server.pid or 0) - before
        report(name, seconds=max(times[1::2]) - min(times[::2]), server_cpu_s=used)
    for p in pipes:
        p.send(None)
    for process in processes:
        process.join()
    pipe.send(None)
    server.join()


if __name__ == "__main__":
    main()
