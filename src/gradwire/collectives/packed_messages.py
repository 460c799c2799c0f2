"""The messages of one run whose length depends on data: sending and receiving.

Between ranks that share memory, a message is read in place, or copied, at its greatest size; its
header says how much of it is in use. Over a network it is packed (packing.py), so it is shorter
than the memory into which it is received; on arrival its rows move to their offsets in the same
memory. A message of several buffers has them packed one after the other; buffers of fixed length
are not packed. A rank that forwards a message packs it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from gradwire.collectives.packing import Packing, padded, table
from gradwire.engine import HEADER_BYTES, Graph, Kind
from gradwire.engine.message import Envelope, check, check_header, check_sum, word_sum, write_header
from gradwire.engine.pool import Pool
from gradwire.engine.thread_driver import Outgoing
from gradwire.errors import CodecError


def packed(
    graph: Graph, packings: Sequence[Packing | None], reached: frozenset[int]
) -> frozenset[int]:
    """The sends and receives whose messages travel packed: those with ranks that share no memory
    with this one."""
    return frozenset(
        task
        for task, peer in enumerate(graph.peer)
        if peer >= 0 and peer not in reached
        if any(packings[buffer] is not None for buffer in graph.message(task))
    )


Buffers = tuple[int, ...]  # of one message


class PackedMessages:
    """The messages of one run whose length depends on data.

    Args:
        graph: of the run.
        packings: per buffer; None for fixed lengths, which occur here only in messages with others.
        tasks: the sends and receives whose messages travel packed.
        pool: memory for packed messages.
        memory: (buffers) -> their message (uint8), at its greatest size.
        envelope: (buffer) -> its envelope.
    """

    def __init__(
        self,
        graph: Graph,
        packings: Sequence[Packing | None],
        tasks: frozenset[int],
        pool: Pool,
        memory: Callable[..., torch.Tensor],
        envelope: Callable[[int], Envelope],
    ) -> None:
        self._graph = graph
        self._packings = packings
        self._tasks = tasks
        self._pool = pool
        self._memory = memory
        self._envelope = envelope
        self._lock = threading.Lock()
        self._used: dict[int, np.ndarray] = {}  # buffer -> bytes in use per row
        self._leaving: dict[Buffers, torch.Tensor] = {}  # packed, from first send to last end
        self._sends: dict[Buffers, int] = {}  # how many sends have not ended
        for task in tasks:
            if graph.kind[task] is Kind.SEND:
                buffers = graph.message(task)
                self._sends[buffers] = self._sends.get(buffers, 0) + 1

    # ---- sending -------------------------------------------------------------------------------

    def seal(self, buffer: int, version: int) -> None:
        """Write the header of an encoded message."""
        packing, message = self._packings[buffer], self._memory(buffer)
        assert packing is not None
        envelope, array = self._envelope(buffer), message.numpy()
        used = self._used[buffer] = packing.used(array)
        assert packing.possible(used), "an encode has written more than there is room for"
        checksum = packing.checksum(array, used) if envelope.checksum else 0
        write_header(message, envelope, int(padded(used).sum()), checksum, version)

    def outgoing(self, task: int) -> Outgoing:
        """The message of a send, for the transport."""
        buffers = self._graph.message(task)
        if task not in self._tasks:
            return Outgoing(self._memory(*buffers), sum(self._nbytes(b, False) for b in buffers))
        sizes = [self._nbytes(buffer, True) for buffer in buffers]
        with self._lock:  # sends of one message may be posted by several threads
            if buffers not in self._leaving:
                self._leaving[buffers] = self._pack(buffers, sizes)
            return Outgoing(self._leaving[buffers][: sum(sizes)], sum(sizes))

    def _nbytes(self, buffer: int, is_packed: bool) -> int:
        """Bytes of a buffer on the wire: packed; or those in use, where it is read in place."""
        packing = self._packings[buffer]
        if packing is None:
            return self._memory(buffer).numel()
        in_use = int(padded(self._used[buffer]).sum())
        return in_use + (packing.head_bytes if is_packed else HEADER_BYTES)

    def _pack(self, buffers: Buffers, sizes: Sequence[int]) -> torch.Tensor:
        taken = self._pool.take(sum(sizes))
        at = 0
        for buffer, nbytes in zip(buffers, sizes, strict=True):
            packing, lying = self._packings[buffer], self._memory(buffer).numpy()
            array = taken.numpy()[at : at + nbytes]
            if packing is None:
                array[:] = lying
            else:
                used = self._used[buffer]
                array[:HEADER_BYTES] = lying[:HEADER_BYTES]
                array[HEADER_BYTES : packing.head_bytes] = table(used)
                packing.gather(lying, used, array[packing.head_bytes :])
            at += nbytes
        return taken

    def sent(self, task: int) -> None:
        """A send has ended; after the last send of its message, give back the packed memory."""
        if task not in self._tasks:
            return
        buffers = self._graph.message(task)
        with self._lock:
            self._sends[buffers] -= 1
            left = None if self._sends[buffers] else self._leaving.pop(buffers)
        if left is not None:
            self._pool.give(left)

    # ---- receiving -----------------------------------------------------------------------------

    def received(self, task: int) -> None:
        """A message has arrived: check it, and move its rows to their offsets.

        Raises:
            CodecError: it is not the expected one.
        """
        buffers, sender = self._graph.message(task), self._graph.peer[task]
        message = self._memory(*buffers)
        if task not in self._tasks:
            for buffer in buffers:
                self._received_whole(buffer, sender)
            return
        places, at = [], 0
        for buffer in buffers:
            nbytes, checksum = self._parse_head(buffer, message[at:], sender)
            places.append((buffer, at, nbytes, checksum))
            at += nbytes
        # No buffer's place is before its packed bytes, so the last one is unpacked first.
        for buffer, at, nbytes, checksum in reversed(places):
            taken = self._pool.take(nbytes)
            apart = taken[:nbytes]
            apart.copy_(message[at : at + nbytes])
            self._unpack(buffer, apart, checksum, sender)
            self._pool.give(taken)

    def _parse_head(self, buffer: int, message: torch.Tensor, sender: int) -> tuple[int, int]:
        """(packed bytes of a buffer, their expected checksum); `message` begins with the buffer."""
        packing = self._packings[buffer]
        if packing is None:
            return self._memory(buffer).numel(), 0
        envelope, used = self._envelope(buffer), packing.told(message.numpy())
        body = int(padded(used).sum())
        checksum = check_header(message, envelope, sender, body)
        if not packing.possible(used):
            raise CodecError(f"{envelope.of(sender)}: a payload is longer than it can be")
        self._used[buffer] = used
        return packing.head_bytes + body, checksum

    def _unpack(self, buffer: int, apart: torch.Tensor, checksum: int, sender: int) -> None:
        """Move a buffer's packed rows to their offsets."""
        packing, message, envelope = self._of(buffer)
        if packing is None:
            message.copy_(apart)
            check(message, envelope, sender)
            return
        came, array, used = apart.numpy(), message.numpy(), self._used[buffer]
        if envelope.checksum:
            check_sum(checksum, word_sum(came[HEADER_BYTES:]), envelope, sender)
        if not np.array_equal(came[HEADER_BYTES : packing.head_bytes], table(used)):
            raise CodecError(f"{envelope.of(sender)}: the padding of its table is not zero")
        array[:HEADER_BYTES] = came[:HEADER_BYTES]
        packing.scatter(came[packing.head_bytes :], used, array)
        if not np.array_equal(packing.used(array), used):
            raise CodecError(f"{envelope.of(sender)}: a payload's counts contradict its length")

    def _received_whole(self, buffer: int, sender: int) -> None:
        packing, message, envelope = self._of(buffer)
        if packing is None:
            check(message, envelope, sender)
            return
        array = message.numpy()
        used = packing.used(array)
        expected = check_header(message, envelope, sender, int(padded(used).sum()))
        if not packing.possible(used):
            raise CodecError(f"{envelope.of(sender)}: a payload is longer than it can be")
        if envelope.checksum:
            check_sum(expected, packing.checksum(array, used), envelope, sender)
        self._used[buffer] = used

    def _of(self, buffer: int) -> tuple[Packing | None, torch.Tensor, Envelope]:
        return self._packings[buffer], self._memory(buffer), self._envelope(buffer)
