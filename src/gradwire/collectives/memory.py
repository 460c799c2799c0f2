"""The memory of a running collective: on the CPU one arena for kernels and transport; on a GPU one
arena for the kernels, and pinned memory for the transport.

On a GPU, kernels run on a side stream. A received message is copied to the GPU before a kernel
reads it, and what a kernel writes is copied back before it is sent, at the same offset in both. The
host sends the message, so its thread waits for the copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from gradwire.engine import Communicator, Pool

Slice = tuple[int, int]  # byte range [first, last)


class Memory:
    """One collective's memory, from its start to its end: one arena, on the tensors' device.

    In stream order it may be given back as soon as all work on it is queued: its next user's work
    is queued on the same stream, after that.

    Args:
        pool: of arenas on the device.
        nbytes: the arena's size, workspace included.

    Attributes:
        arena: uint8, the kernels' payloads and workspace.
        messages: uint8, the transport's messages; here the arena itself.
    """

    def __init__(self, pool: Pool, nbytes: int) -> None:
        self._pool = pool
        self.arena = self.messages = pool.take(nbytes)

    def kernels(
        self, reads: Iterable[Slice], writes: Iterable[Slice]
    ) -> AbstractContextManager[None]:
        """A context for calls of kernels that read and write these messages; on exit they have
        ended."""
        return nullcontext()

    def give(self) -> None:
        """Give the memory back."""
        self._pool.give(self.arena)


class StagedMemory(Memory):
    """On a GPU, whose messages lie in pinned memory.

    Args:
        comm: owns the pools.
        device: of the arena.
        nbytes: the arena's size, workspace included.
        message_bytes: size of the messages, which come first.
        ready: event on the caller's stream after which values may be read; None: at once.
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
        with torch.cuda.stream(self._stream):  # no effect for None
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
    """Whether transports cannot access memory of `device`."""
    return device.type != "cpu"
