"""Ranks as threads over the loopback transport, and as processes over gloo.

If one fails, the test's report tells how every rank ended, in chronological order.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fifo import FifoHub
from gradwire.engine import Communicator
from gradwire.lab.ports import free_port
from gradwire.transport import Hub
from rank_ends import End, collect, in_time, report, stack

WORLD_SIZES = [1, 2, 3, 4, 5, 8]


def as_threads(
    world_size: int,
    body: Callable[[Communicator], Any],
    hub: Hub | None = None,
    timeout: float = 60.0,
    fifo: FifoHub | None = None,
) -> list[Any]:
    """Run `body` on all ranks concurrently; returns its results, in rank order.

    Raises the first error, with a report of every rank as its note. Collectives run in order over
    `fifo` if it is given; else with tags, over `hub`.
    """
    hub = hub or Hub(world_size)
    ends: dict[int, End] = {}
    errors: dict[int, BaseException] = {}
    links: list[Any] = [lambda device, r=r: fifo and fifo.link(r) for r in range(world_size)]
    comms = [Communicator(hub.transport(r), links=links[r]) for r in range(world_size)]

    def run(rank: int) -> None:
        try:
            result = body(comms[rank])
            ends[rank] = End(rank, time.monotonic(), result)
        except BaseException as error:
            errors[rank] = error
            ends[rank] = End(rank, time.monotonic(), None, traceback.format_exc())

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world_size)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    hung = {rank: stack(thread) for rank, thread in enumerate(threads) if thread.is_alive()}
    said = report(begun, ends.values(), hung) if errors or hung else ""
    for comm in comms:
        comm.close()
    assert not hung, f"ranks {list(hung)} hang; {said}"
    for end in in_time(ends.values()):
        if end.rank in errors:
            error = errors[end.rank]
            error.__notes__ = [*getattr(error, "__notes__", ()), said]  # add_note: Python 3.11
            raise error
    return [ends[rank].result for rank in range(world_size)]


def caught(body: Callable[[], Any]) -> BaseException | None:
    """The error that `body` raises."""
    try:
        body()
    except BaseException as error:
        return error
    return None


def forkserver(*more: str) -> Any:
    """A context that forks processes from a server, which has imported slow modules and `more`.

    torch imports its compiler when the first DDP module is made.
    """
    context = mp.get_context("forkserver")
    ours = ("attach", "backend", "backend_register", "sharded")
    context.set_forkserver_preload(
        [
            "torch",
            "torch._dynamo",
            "torch.distributed.fsdp",
            *(f"gradwire.integrations.{name}" for name in ours),
            *more,
        ]
    )
    return context


def as_processes(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    deadline: float = 120.0,
    expect_death: tuple[int, ...] = (),
    backend: str | None = "gloo",
) -> list[Any]:
    """Run `body(rank, *args)` in `world_size` processes; returns their results, in rank order.

    `timeout` and `backend` are the process group's (None: no group); `deadline` is the longest wait
    for the next rank. Ranks in `expect_death` may die: their result is None. Raises
    `AssertionError` with a report of every rank.
    """
    context = forkserver()
    reports, over = context.Queue(), context.Event()
    port = free_port()
    given = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        context.Process(
            target=_process,
            args=(reports, over, (rank, world_size, timeout, backend), given, body, args),
        )
        for rank in range(world_size)
    ]
    begun = time.monotonic()
    for process in processes:
        process.start()
    ends: dict[int, End] = {}
    try:
        awaited = {r: p for r, p in enumerate(processes) if r not in expect_death}
        ends = collect(awaited, reports, deadline)
        running = dict.fromkeys(sorted(awaited.keys() - ends.keys()), "")
        failed = [end.rank for end in in_time(ends.values()) if end.said]
        if failed or running:
            named = failed or list(running)
            raise AssertionError(f"ranks {named} failed; {report(begun, ends.values(), running)}")
    finally:
        over.set()
        for rank, process in enumerate(processes):
            process.join(10 if rank in ends else 0.1)
            process.kill()
            process.join()
    return [ends[rank].result if rank in ends else None for rank in range(world_size)]


def _process(  # type: ignore[no-untyped-def]
    reports, over, where, environment, body, args
):
    rank, world_size, timeout, backend = where
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)
    try:
        if backend is not None:
            dist.init_process_group(
                backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
            )
        result = body(rank, *args)
        reports.put(End(rank, time.monotonic(), result))
        over.wait()  # the others may still need this process: rank 0 hosts the store
    except BaseException:
        reports.put(End(rank, time.monotonic(), None, traceback.format_exc()))
    finally:
        reports.close()
        reports.join_thread()
        os._exit(0)  # a broken gloo group does not always let its process end
