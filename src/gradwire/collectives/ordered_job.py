"""One run of a prepared collective in stream order.

Kernels and messages share one arena, on the tensors' device. Messages keep room for a header, so
that offsets and byte counts are as on the other drivers; the header is not used.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.collectives.job import Job
from gradwire.collectives.memory import Memory
from gradwire.engine.schedule import Wave
from gradwire.engine.stream_driver import Checkable


class OrderedJob(Job):
    """A gradwire.engine.stream_driver.StreamWork."""

    @property
    def schedule(self) -> Sequence[Wave]:
        return self.collective.program.stages

    def start(self) -> None:
        c = self.collective
        self.held = Memory(c.pool, c.arena_bytes)
        self._fill()
        stream = c.comm.pools.stream(c.device)
        if stream is not None and self.ready is not None:
            stream.wait_event(self.ready)
            # The caller may drop its tensors before the queued work has ended.
            given = [t for i in self.items for t in (i.values, i.residual, i.home) if t is not None]
            for tensor in {t.untyped_storage().data_ptr(): t for t in given}.values():
                tensor.record_stream(stream)

    def compute(self, task: int) -> None:
        self.run_kernels(task, self.find(task))

    def verdicts(self) -> Sequence[Checkable]:
        return [mark.verdict() for mark in self.collective.marks if mark is not None]
