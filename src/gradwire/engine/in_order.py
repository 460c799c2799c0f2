"""The in-order executor: runs collectives on a stream, one after the other, as NCCL wants it.

There is no thread and no queue: `submit` puts a job's kernels and messages on the communicator's
side stream, stage by stage (see engine/schedule.py), and returns. The host waits for nothing: the
stream waits for batches. So whatever else a group's ranks issue on it, such as DDP's broadcasts,
keeps the order of their programs, in which NCCL needs it. On the CPU, which has no streams, waits
are the caller's, and a job has ended when `submit` returns; that is how it is tested.

Memory needs no care: the next job's kernels are behind this one's messages on the stream.

Nor does anyone look at what has come. Plans were compared before, the link keeps the order, and
NCCL is trusted with the bytes. A payload that cannot be decoded shows in a verdict, which the GPU
leaves for the host to find at a later `submit`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from gradwire.engine.executor import Outcome
from gradwire.engine.graph import Graph, Kind
from gradwire.engine.schedule import Stage
from gradwire.engine.streams import StreamFuture, on
from gradwire.errors import GradwireError, TransportError
from gradwire.transport.link import Link, Message
from gradwire.transport.protocol import Pending

log = logging.getLogger("gradwire")


class Verdict(Protocol):
    """Whether payloads were good; known once the stream has come to it."""

    def known(self) -> bool:
        """Whether `check` need not wait; asking does not wait either."""
        ...

    def check(self) -> None:
        """Raise CodecError if one was not."""
        ...


class OrderedJob(Protocol):
    """What the in-order executor asks of a collective; all of it is called with the stream current.

    Attributes:
        graph: its tasks.
        schedule: when to do them.
    """

    graph: Graph

    @property
    def schedule(self) -> Sequence[Stage]: ...

    def start(self) -> None:
        """Take memory, and have the stream wait for the caller's values."""
        ...

    def memory(self, buffer: int) -> torch.Tensor:
        """The message (uint8) of `buffer`, where the kernels have it."""
        ...

    def compute(self, task: int) -> None:
        """Queue the kernels of an encode, merge or decode."""
        ...

    def verdicts(self) -> Sequence[Verdict]:
        """On the payloads that were decoded; called once, when everything is queued."""
        ...

    def finish(self) -> None:
        """Give memory back; called once, when everything is queued."""
        ...


class InOrder:
    """Runs jobs over one link. Jobs are submitted in the same order on every rank.

    Args:
        link: moves the bytes.
        stream: on which kernels run, and which waits for messages; None on the CPU.

    Attributes:
        error: what broke this group, or None.
    """

    def __init__(self, link: Link, stream: torch.cuda.Stream | None = None) -> None:
        self.link = link
        self.stream = stream
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._verdicts: deque[Verdict] = deque()

    def submit(self, job: OrderedJob) -> Future[Outcome]:
        """Queue `job`.

        Returns:
            A future that has ended, with the error if there was one. Its seconds are those that
            queueing took.

        Raises:
            TransportError: an earlier failure broke this group.
            CodecError: an earlier job decoded what no encode makes; that breaks the group too.
        """
        with self._lock:
            self._look()
            if self.error is not None:
                raise self.error
            begun = time.perf_counter()
            future: StreamFuture[Outcome] = StreamFuture(self.stream)
            try:
                with on(self.stream):
                    wire_bytes = self._run(job)
                    self._verdicts.extend(job.verdicts())
            except BaseException as error:
                if not isinstance(error, Exception):  # a KeyboardInterrupt: half of it is queued
                    text = (
                        f"rank {self.link.rank}: {type(error).__name__} while a collective started"
                    )
                    self._fail(TransportError(text))
                    raise
                self._fail(error)
                future.set_exception(self.error)
            else:
                future.set_result(Outcome(time.perf_counter() - begun, wire_bytes, 0.0))
        return future

    def _run(self, job: OrderedJob) -> int:
        """Queue the stages of `job`; the bytes that it sends."""
        job.start()
        under_way: deque[Pending] = deque()
        ended = wire_bytes = 0
        for stage in job.schedule:
            while ended < stage.ended:
                under_way.popleft().wait()
                ended += 1
            for task in stage.kernels:
                job.compute(task)
            if stage.messages:
                batch = [_message(job, task) for task in stage.messages]
                under_way.append(self.link.post(batch))
                wire_bytes += sum(m.memory.numel() for m in batch if not m.incoming)
        for pending in under_way:
            pending.wait()
        job.finish()
        return wire_bytes

    def close(self) -> None:
        """Jobs that are submitted later end in a TransportError."""
        error = TransportError(
            f"rank {self.link.rank}: this process group was destroyed; attach again in the new one"
        )
        self.error = self.error or error
        self.link.close()

    def _look(self) -> None:
        """Take in the verdicts that are known by now."""
        while self.error is None and self._verdicts and self._verdicts[0].known():
            try:
                self._verdicts.popleft().check()
            except GradwireError as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """The first error breaks the group, and peers are told."""
        if self.error is not None:
            return  # closed meanwhile
        if isinstance(error, GradwireError):
            log.error("%s", error)
        else:
            log.exception("gradwire: a task failed", exc_info=error)
        self.error = error
        peer = error.peer if isinstance(error, TransportError) else None
        self.link.fail(self.link.rank if peer is None else peer)


def _message(job: OrderedJob, task: int) -> Message:
    graph = job.graph
    incoming = graph.kind[task] is Kind.RECV
    return Message(job.memory(graph.message(task)), graph.peer[task], incoming)
