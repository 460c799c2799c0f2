"""Where the messages of a running collective lie: one arena for kernels and transport on the CPU;
on a GPU an arena of its own for the kernels, and pinned memory for the transport.

There, kernels run on a side stream. What a message brings is copied to the GPU before a kernel
reads it, what a kernel writes is copied back before it is sent, at the same place in both. It is
sent by the host, so the host waits for the copy; its thread has nothing else to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from gradwire.engine import Communicator

Slice = tuple[int, int]  # first byte, and the byte behind the last


class Memory(Protocol):
    """One collective's memory, from its start to its end.

    Attributes:
        arena: uint8, where kernels read and write payloads, and their workspace.
        messages: uint8, where the transport reads and writes them; perhaps the arena itself.
    """

    arena: torch.Tensor
    messages: torch.Tensor

    def kernels(
        self, reads: Iterable[Slice], writes: Iterable[Slice]
    ) -> AbstractContextManager[None]:
        """Within it kernels are called that read and write these messages; behind it they have."""
        ...

    def give(self) -> None:
        """It is not needed any more."""
        ...


class HostMemory:
    """On the CPU."""

    def __init__(self, comm: Communicator, nbytes: int) -> None:
        self._pool = comm.pools.of(torch.device("cpu"))
        self.arena = self.messages = self._pool.take(nbytes)

    @contextmanager
    def kernels(self, reads: Iterable[Slice], writes: Iterable[Slice]) -> Iterator[None]:
        yield

    def give(self) -> None:
        self._pool.give(self.arena)


class StagedMemory:
    """On a GPU.

    Args:
        comm: whose pools.
        device: of the kernels' arena.
        nbytes: of that, workspace included.
        message_bytes: of the messages, which come first.
        ready: what the caller's stream must have reached before values are read; None: now.
    """

    def __init__(
        self,
        comm: Communicator,
        device: torch.device,
        nbytes: int,
        message_bytes: int,
        ready: torch.cuda.Event | None,
    ) -> None:
        self._pools = comm.pools.of(device), comm.pools.of(device, staging=True)
        self.arena, self.messages = (
            pool.take(n) for pool, n in zip(self._pools, (nbytes, message_bytes), strict=True)
        )
        self._stream = comm.pools.stream(device)
        if self._stream is not None and ready is not None:
            self._stream.wait_event(ready)

    @contextmanager
    def kernels(self, reads: Iterable[Slice], writes: Iterable[Slice]) -> Iterator[None]:
        with torch.cuda.stream(self._stream):  # without effect where there is none
            for first, end in reads:
                self.arena[first:end].copy_(self.messages[first:end], non_blocking=True)
            yield
            for first, end in writes:
                self.messages[first:end].copy_(self.arena[first:end], non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def give(self) -> None:
        for pool, memory in zip(self._pools, (self.arena, self.messages), strict=True):
            pool.give(memory)


def is_staged(device: torch.device) -> bool:
    """Whether transports cannot reach memory of `device`."""
    return device.type != "cpu"
