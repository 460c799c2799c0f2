"""One run of a prepared collective with messages whose length depends on data.

Between ranks that share memory, a message is read in place, or copied, at its greatest size; its
header says how much of it is in use. Over a network it is packed (packing.py), so it is shorter
than the memory into which it is received; on arrival its rows move to their offsets in the same
memory. A message of several buffers has them packed one after the other; buffers of fixed length
are not packed. A rank that forwards a message packs it again.
"""

from __future__ import annotations

import threading
from itertools import accumulate

import numpy as np
import torch

from gradwire.collectives.job import Job
from gradwire.engine import HEADER_BYTES
from gradwire.engine.message import align, version_of
from gradwire.engine.runs import Outgoing
from gradwire.errors import CodecError


class PackedJob(Job):
    """A gradwire.engine.runs.Work."""

    def start(self) -> None:
        super().start()
        comm = self.collective.comm
        self.packings = self.collective.program.packings
        # Buffer -> bytes in use per row; the greatest until it is encoded or received.
        self.used = {buffer: packing.most for buffer, packing in self.packings.items()}
        self.reached = comm.transport.reached
        self.pool = comm.pools.of(torch.device("cpu"), staging=True)
        self.lock = threading.Lock()
        self.leaving: dict[tuple[int, ...], tuple[torch.Tensor, int]] = {}  # packed, and its bytes

    def _fixed(self, buffers: tuple[int, ...]) -> bool:
        """Whether no buffer's length depends on data."""
        return not any(self.packings[buffer].counted for buffer in buffers)

    def _parts(self, buffer: int) -> list[np.ndarray]:
        return self.packings[buffer].parts(self.memory(buffer).numpy(), self.used[buffer])

    def _seal(self, buffers: tuple[int, ...]) -> None:
        if self._fixed(buffers):
            super()._seal(buffers)
            return
        for buffer in buffers:
            packing, envelope = self.packings[buffer], self._envelope(buffer)
            self.used[buffer] = packing.seal(self.memory(buffer), envelope, self.ticket.version)

    def outgoing(self, task: int) -> Outgoing:
        buffers = self.collective.message[task]
        if self._fixed(buffers):
            return super().outgoing(task)
        if self.graph.peer[task] in self.reached:
            nbytes = sum(HEADER_BYTES + int(align(self.used[b]).sum()) for b in buffers)
            return Outgoing(self.memory(*buffers), nbytes)
        with self.lock:  # sends of one message may be posted by several threads
            if buffers not in self.leaving:
                parts = [part for buffer in buffers for part in self._parts(buffer)]
                nbytes = sum(map(len, parts))
                memory = self.pool.take(nbytes)
                np.concatenate(parts, out=memory.numpy()[:nbytes])
                self.leaving[buffers] = memory, nbytes
            memory, nbytes = self.leaving[buffers]
        return Outgoing(memory[:nbytes], nbytes)

    def received(self, task: int) -> None:
        buffers, sender = self.collective.message[task], self.graph.peer[task]
        if self._fixed(buffers):
            super().received(task)
            return
        message, packed = self.memory(*buffers), sender not in self.reached
        parts: list[np.ndarray] = []
        at = 0
        for buffer in buffers:
            packing, envelope = self.packings[buffer], self._envelope(buffer)
            self.used[buffer] = packing.check(message[at:], envelope, sender, packed)
            of_buffer = self._parts(buffer) if packed else [self.memory(buffer).numpy()]
            parts += of_buffer
            at += sum(map(len, of_buffer))
        if packed:
            apart = self.pool.take(at)  # a message overlaps with the places of its parts
            apart[:at] = message[:at]
            for part, end in zip(parts, accumulate(map(len, parts)), strict=True):
                part[:] = apart.numpy()[end - len(part) : end]
            self.pool.give(apart)
        for buffer in buffers:
            message, used = self.memory(buffer), self.used[buffer]
            if packed and not np.array_equal(self.packings[buffer].used(message.numpy()), used):
                what = self._envelope(buffer).of(sender)
                raise CodecError(f"{what}: a payload's counts contradict its length")
            self.ticket.version = min(self.ticket.version, version_of(message))

    def finish(self) -> None:
        super().finish()
        for memory, _ in self.leaving.values():
            self.pool.give(memory)
        self.leaving, self.used = {}, {}
