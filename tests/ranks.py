"""Ranks as threads over the loopback transport, and as processes over gloo."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fifo import FifoHub
from gradwire.engine import Communicator
from gradwire.transport import Hub

WORLD_SIZES = [1, 2, 3, 4, 5, 8]


def as_threads(
    world_size: int,
    body: Callable[[Communicator], Any],
    hub: Hub | None = None,
    timeout: float = 60.0,
    fifo: FifoHub | None = None,
) -> list[Any]:
    """Run `body` on every rank at once; what it returned, in rank order, or the first error.

    Collectives run in order over `fifo` where it is given; else with tags, over `hub`.
    """
    hub = hub or Hub(world_size)
    results: list[Any] = [None] * world_size
    errors: list[BaseException | None] = [None] * world_size
    links: list[Any] = [lambda device, r=r: fifo and fifo.link(r) for r in range(world_size)]
    comms = [Communicator(hub.transport(r), links=links[r]) for r in range(world_size)]

    def run(rank: int) -> None:
        try:
            results[rank] = body(comms[rank])
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    for comm in comms:
        comm.close()
    assert not hung, f"ranks {hung} hang"
    for error in errors:
        if error is not None:
            raise error
    return results


def caught(body: Callable[[], Any]) -> BaseException | None:
    """The error that `body` raises."""
    try:
        body()
    except BaseException as error:
        return error
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def as_processes(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    deadline: float = 120.0,
    expect_death: tuple[int, ...] = (),
    backend: str = "gloo",
) -> list[Any]:
    """Run `body(rank, *args)` in `world_size` processes; what they returned, in rank order.

    `timeout` and `backend` are the process group's. Ranks in `expect_death` may die; theirs is
    None.
    """
    # Forked from a server that has imported what takes seconds, and has done nothing with it.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "gradwire"])
    queue = context.Queue()
    port = free_port()
    processes = [
        context.Process(
            target=_process,
            args=(queue, rank, world_size, port, timeout, backend, dict(os.environ), body, args),
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    try:
        while len(results) < world_size - len(expect_death):
            rank, ok, value = queue.get(timeout=deadline)
            assert ok, f"rank {rank} failed:\n{value}"
            results[rank] = value
    finally:
        for process in processes:
            process.join(10 if len(results) else 0.1)
            process.kill()
            process.join()
    return [results.get(rank) for rank in range(world_size)]


def _process(  # type: ignore[no-untyped-def]
    queue, rank, world_size, port, timeout, backend, environment, body, args
):
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        dist.init_process_group(
            backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        queue.put((rank, True, body(rank, *args)))
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
    finally:
        queue.close()
        queue.join_thread()
        os._exit(0)  # a broken gloo group does not always let its process end
