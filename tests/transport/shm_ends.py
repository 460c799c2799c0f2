"""Ends of shared memory whose ranks are threads of one process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gradwire.transport.shm import Shm
from gradwire.transport.shm_process import Stores


@contextmanager
def ends(
    world_size: int,
    timeout: float = 20.0,
    ring_bytes: int | None = None,
    stores: Stores | None = None,
) -> Iterator[list[Shm]]:
    """Every rank's end, each connected with all others.

    All ranks use `stores`, as one process; by default each has its own, as separate processes.
    """
    made = [
        Shm(rank, world_size, peers, timeout, ring_bytes, stores or Stores())
        for rank in range(world_size)
        for peers in [[p for p in range(world_size) if p != rank]]
    ]
    for end in made:
        for peer in made:
            if peer is not end:
                end.connect(peer.rank, peer.fd, os.pidfd_open(os.getpid()), peer.lends)
    for end in made:
        end.passed()
    try:
        yield made
    finally:
        closing = [threading.Thread(target=end.close) for end in made]
        for (
            thread
        ) in closing:  # together, as ranks do: each waits for others to read its last sends
            thread.start()
        for thread in closing:
            thread.join()


def at_once(*bodies: Callable[[], Any], seconds: float = 60.0) -> list[Any]:
    """Run each in its own thread; returns their results, or raises the first error."""
    results: list[Any] = [None] * len(bodies)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = bodies[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    hung = [i for i, thread in enumerate(threads) if thread.is_alive()]
    if errors:
        raise errors[0]
    assert not hung, f"{hung} hang"
    return results
