"""How messages travel between ranks that are threads: queues, memory, links in stream order."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fifo import FifoHub
from gradwire.transport import Hub
from rooms.collectives import job, placement
from transport.shm_ends import ends

MESSAGES = ["queues", "staged", "borrowed", "shm", "in_order"]


class Machine:
    """Ranks that share memory, with the interface of a hub."""

    def __init__(self, made: list[Any]) -> None:
        self.made = made
        self.board = dist.HashStore()

    def transport(self, rank: int) -> Any:
        end = self.made[rank]
        end.board, end.tick = self.board, lambda: None  # of the group's own transport elsewhere
        return end


@contextmanager
def travelling(messages: str, n: int, sent: Counter[int], lazy: bool) -> Iterator[dict[str, Any]]:
    """What `as_threads` takes for messages that travel in this way; `sent` counts bytes of queues,
    per rank. In order, a batch begins as early as it can, or (`lazy`) when it is waited for."""
    lock = threading.Lock()

    def count(source: int, destination: int, tag: int, message: torch.Tensor) -> None:
        with lock:
            sent[source] += message.numel()

    with pytest.MonkeyPatch.context() as patch:
        if messages in ("borrowed", "shm"):
            patch.setattr(placement, "BORROWED_BYTES", 0)
        if messages == "staged":  # separate memory for kernels, as on a GPU
            patch.setattr(job, "is_staged", lambda device: True)
        if messages == "shm":
            with ends(n) as made:
                yield {"hub": Machine(made)}
        elif messages == "in_order":
            yield {"fifo": FifoHub(n, lazy)}
        elif messages == "borrowed":  # a hub that overwrites what is given back
            yield {"hub": Hub(n, lends=True)}
        else:
            yield {"hub": Hub(n, corrupt=count)}
