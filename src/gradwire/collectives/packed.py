"""The messages of one round whose length depends on data: how they leave, and how they come.

Between ranks that share memory a message stays where it is, or is copied, at its greatest size, and
its header says how much of it is in use. Over a network it is packed (packing.py), so it is shorter
than the memory in which it is received. That is where it will lie: when it is here, its rows go to
their places. A message of several buffers has them packed one behind the other; one of known length
is as it is. Whoever sends a message on packs it again.
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
from gradwire.engine.threads import Outgoing
from gradwire.errors import CodecError


def packed(
    graph: Graph, packings: Sequence[Packing | None], reached: frozenset[int]
) -> frozenset[int]:
    """The sends and receives whose messages travel packed: those to and from the ranks with which
    no memory is shared."""
    return frozenset(
        task
        for task, peer in enumerate(graph.peer)
        if peer >= 0 and peer not in reached
        if any(packings[buffer] is not None for buffer in graph.message(task))
    )


Buffers = tuple[int, ...]  # of one message


class PackedMessages:
    """Those of one round.

    Args:
        graph: of the round.
        packings: of each buffer; None for those of a fixed length, which are asked for here only
            where they share a message with others.
        tasks: the sends and receives whose messages travel packed.
        pool: lends memory for packed messages.
        memory: the message (uint8) of buffers, at its greatest size.
        envelope: of a buffer.
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
        self._used: dict[int, np.ndarray] = {}  # bytes of each row, of what is encoded or received
        self._leaving: dict[Buffers, torch.Tensor] = {}  # packed, from first send to the last's end
        self._sends: dict[Buffers, int] = {}  # that have not ended
        for task in tasks:
            if graph.kind[task] is Kind.SEND:
                buffers = graph.message(task)
                self._sends[buffers] = self._sends.get(buffers, 0) + 1

    # ---- leaving -------------------------------------------------------------------------------

    def seal(self, buffer: int, version: int) -> None:
        """Write the header of what was encoded."""
        packing, message = self._packings[buffer], self._memory(buffer)
        assert packing is not None
        envelope, array = self._envelope(buffer), message.numpy()
        used = self._used[buffer] = packing.used(array)
        assert packing.possible(used), "an encode leaves no more than there is room for"
        checksum = packing.checksum(array, used) if envelope.checksum else 0
        write_header(message, envelope, int(padded(used).sum()), checksum, version)

    def outgoing(self, task: int) -> Outgoing:
        """What a send hands to the transport."""
        buffers = self._graph.message(task)
        if task not in self._tasks:
            return Outgoing(self._memory(*buffers), sum(self._nbytes(b, False) for b in buffers))
        sizes = [self._nbytes(buffer, True) for buffer in buffers]
        with self._lock:  # sends of one message may be posted by several threads
            if buffers not in self._leaving:
                self._leaving[buffers] = self._pack(buffers, sizes)
            return Outgoing(self._leaving[buffers][: sum(sizes)], sum(sizes))

    def _nbytes(self, buffer: int, is_packed: bool) -> int:
        """Bytes that travel, or that count."""
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
        """A send's memory is free: after the last send of its message it is given back."""
        if task not in self._tasks:
            return
        buffers = self._graph.message(task)
        with self._lock:
            self._sends[buffers] -= 1
            left = None if self._sends[buffers] else self._leaving.pop(buffers)
        if left is not None:
            self._pool.give(left)

    # ---- coming --------------------------------------------------------------------------------

    def received(self, task: int) -> None:
        """A message is here: check it, and put its rows where they belong.

        Raises:
            CodecError: it is not what was expected.
        """
        buffers, sender = self._graph.message(task), self._graph.peer[task]
        message = self._memory(*buffers)
        if task not in self._tasks:
            for buffer in buffers:
                self._received_whole(buffer, sender)
            return
        places, at = [], 0
        for buffer in buffers:
            nbytes, checksum = self._told(buffer, message[at:], sender)
            places.append((buffer, at, nbytes, checksum))
            at += nbytes
        # A buffer's place is not before what came of it: so the last one is free first.
        for buffer, at, nbytes, checksum in reversed(places):
            taken = self._pool.take(nbytes)
            apart = taken[:nbytes]
            apart.copy_(message[at : at + nbytes])
            self._unpack(buffer, apart, checksum, sender)
            self._pool.give(taken)

    def _told(self, buffer: int, message: torch.Tensor, sender: int) -> tuple[int, int]:
        """(bytes of what came for a buffer, the sum they must have); `message` begins there."""
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
        """Put what came for a buffer into its place."""
        packing, message, envelope = self._of(buffer)
        if packing is None:
            message.copy_(apart)
            check(message, envelope, sender)
            return
        came, array, used = apart.numpy(), message.numpy(), self._used[buffer]
        if envelope.checksum:
            check_sum(checksum, word_sum(came[HEADER_BYTES:]), envelope, sender)
        if not np.array_equal(came[HEADER_BYTES : packing.head_bytes], table(used)):
            raise CodecError(f"{envelope.of(sender)}: behind its table there are no zeros")
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
