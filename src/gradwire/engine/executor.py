"""The executor: runs graphs on three queues, so that kernels, sending and receiving overlap.

    compute   a thread that runs kernels in the order in which their inputs arrive, and posts the
              sends that they release (posting returns at once)
    inbound   a thread that awaits receives, job by job, in the order of their graphs
    outbound  a thread that awaits sends, so that buffers are not reused before they are on the wire

Kernels and waits release the GIL, so the three run beside backward. All receives of a job are
posted among its first kernels: a transport that waits for both ends to be ready then loses no round
trip.
Jobs own memory `in_flight` at a time, in their order; later ones queue, and nobody blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import torch

from gradwire.engine.graph import Graph, Kind
from gradwire.engine.trace import Trace, Traced
from gradwire.errors import GradwireError, TransportError
from gradwire.transport import Transport
from gradwire.transport.protocol import Loan, Pending

log = logging.getLogger("gradwire")

# On closing, a thread that waits for a peer is left behind after this time; it is a daemon.
_LAST_STEP_S = 1.0


# When it was put there, and what to do.
_Queue = SimpleQueue["tuple[float, partial[None]] | None"]


class Job(Protocol):
    """What the executor asks of a collective that it runs.

    Attributes:
        graph: what to do.
        borrowed: bytes of the messages that are read where the peer that sends them has put them.
        kernel_seconds: what kernels have taken so far, checksums of what they wrote included.
    """

    graph: Graph
    borrowed: Mapping[int, int]
    kernel_seconds: float

    def start(self) -> None:
        """Take memory; called once, when one of the `in_flight` places is free."""
        ...

    def memory(self, buffer: int) -> torch.Tensor:
        """The message (uint8) of `buffer`."""
        ...

    def lend(self, buffer: int, loan: Loan, message: torch.Tensor) -> None:
        """The message of a borrowed buffer is here; the job gives it back after its last reader."""
        ...

    def tag(self, buffer: int) -> int:
        """A number for `buffer`: the same on both ends, another for all others in flight."""
        ...

    def compute(self, task: int) -> None:
        """Run the kernels of an encode, merge or decode."""
        ...

    def received(self, task: int) -> None:
        """Check the message that a recv brought; raises CodecError."""
        ...

    def finish(self) -> None:
        """Give memory back; called once, when every send and receive has ended."""
        ...


@dataclass(frozen=True)
class Outcome:
    """What a job took: seconds from submission to the last task, and of these in kernels; bytes
    handed to the transport."""

    seconds: float
    wire_bytes: int
    kernel_seconds: float


class _Run:
    """One job under way."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.future: Future[Outcome] = Future()
        self.wire_bytes = 0
        self.waits = list(job.graph.waits)
        self.left = len(job.graph)
        self.sends_left = job.graph.kind.count(Kind.SEND)
        self.finished = False
        self.freed = False
        self.submitted = time.perf_counter()


class Executor:
    """Runs jobs over one transport. Jobs are submitted in the same order on every rank.

    Args:
        transport: moves the bytes.
        in_flight: how many jobs may own memory at a time.

    Attributes:
        error: what broke this group, or None.
        trace: gets what the threads do; None costs nothing.
    """

    def __init__(self, transport: Transport, in_flight: int = 2) -> None:
        self.transport = transport
        self.in_flight = in_flight
        self.error: BaseException | None = None
        self.trace: Trace | None = None
        self._lock = threading.Lock()
        self._failing = False  # from the first error on; `error` is set once peers are told
        self._running: deque[_Run] = deque()  # that hold a place, the oldest first
        self._waiting: deque[_Run] = deque()
        self._compute: _Queue = SimpleQueue()
        self._inbound: _Queue = SimpleQueue()
        self._outbound: _Queue = SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._serve, args=(name, queue), name=f"gradwire-{name}", daemon=True
            )
            for name, queue in (
                ("compute", self._compute),
                ("inbound", self._inbound),
                ("outbound", self._outbound),
            )
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> Future[Outcome]:
        """Queue `job`; the future ends with its last task, or with the error that stopped it.

        Raises:
            TransportError: an earlier failure broke this group.
        """
        run = _Run(job)
        with self._lock:
            if self.error is not None:
                raise self.error
            self._waiting.append(run)
        self._admit()
        return run.future

    def close(self) -> None:
        """End the threads. Jobs under way, and any submitted later, end in a TransportError."""
        self._break(
            TransportError(
                f"rank {self.transport.rank}: this process group was destroyed; "
                "attach again in the new one"
            )
        )
        for queue in (self._compute, self._inbound, self._outbound):
            queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_LAST_STEP_S)

    # ---- the life of a job: admitted, its tasks run, ended -------------------------------------

    def _admit(self) -> None:
        with self._lock:
            while self._waiting and len(self._running) < self.in_flight and self.error is None:
                run = self._waiting.popleft()
                self._running.append(run)
                _put(self._compute, self._start, run)

    def _start(self, run: _Run) -> None:
        run.job.start()
        graph = run.job.graph
        for receives, source in graph.opening:
            if receives:
                _put(self._compute, self._expect, run, receives)
            if source is not None:
                self._release(run, source)
        if not len(graph):
            self._ended(run)

    def _expect(self, run: _Run, receives: tuple[int, ...]) -> None:
        """Post these receives."""
        for index in receives:
            buffer, peer = run.job.graph.message(index), run.job.graph.peer[index]
            tag, borrowed = run.job.tag(buffer), run.job.borrowed.get(buffer)
            if borrowed is not None:
                loan = self.transport.borrow(borrowed, peer, tag)
                _put(self._inbound, self._borrow, run, index, loan)
            else:
                pending = self.transport.irecv(run.job.memory(buffer), peer, tag)
                _put(self._inbound, self._receive, run, index, pending)

    def _release(self, run: _Run, index: int) -> None:
        """Task `index` has all that it needs."""
        if run.job.graph.kind[index] is Kind.SEND:
            self._send(run, index)
        else:
            _put(self._compute, self._run_kernel, run, index)

    def _run_kernel(self, run: _Run, index: int) -> None:
        run.job.compute(index)
        self._done(run, index)

    def _send(self, run: _Run, index: int) -> None:
        buffer, peer = run.job.graph.message(index), run.job.graph.peer[index]
        message = run.job.memory(buffer)
        pending = self.transport.isend(message, peer, run.job.tag(buffer))
        _put(self._outbound, self._sent, run, index, pending)
        self._count(run, message.numel())

    def _borrow(self, run: _Run, index: int, loan: Loan) -> None:
        run.job.lend(run.job.graph.message(index), loan, loan.wait())
        run.job.received(index)
        self._done(run, index)

    def _receive(self, run: _Run, index: int, pending: Pending) -> None:
        pending.wait()
        run.job.received(index)
        self._done(run, index)

    def _done(self, run: _Run, index: int) -> None:
        self._release_dependents(run, index)
        self._count(run)

    def _release_dependents(self, run: _Run, index: int) -> None:
        with self._lock:
            ready = []
            for dependent in run.job.graph.dependents[index]:
                run.waits[dependent] -= 1
                if run.waits[dependent] == 0:
                    ready.append(dependent)
        for dependent in ready:
            self._release(run, dependent)

    def _count(self, run: _Run, sent_bytes: int = 0) -> None:
        """One task less to do; a send counts once it is posted."""
        with self._lock:
            run.wire_bytes += sent_bytes
            run.left -= 1
            last = run.left == 0
        if last:
            self._ended(run)

    def _sent(self, run: _Run, index: int, pending: Pending) -> None:
        pending.wait()
        self._release_dependents(run, index)
        with self._lock:
            run.sends_left -= 1
        self._ended(run)

    def _ended(self, run: _Run) -> None:
        """Called after the last task and after each send; acts once each has come to its end."""
        with self._lock:
            finished = run.left == 0 and not run.finished
            run.finished = run.left == 0
            free = run.left == 0 and run.sends_left == 0 and not run.freed
            run.freed = run.freed or free
            # Places free in the order of jobs, as on every rank: else one could wait for a send of
            # a job that its receiver has no place for, and with it for what stands behind.
            while self._running and self._running[0].freed:
                self._running.popleft()
        if free:
            run.job.finish()
            self._admit()
        if finished:
            seconds = time.perf_counter() - run.submitted
            run.future.set_result(Outcome(seconds, run.wire_bytes, run.job.kernel_seconds))

    def begin_trace(self) -> Trace:
        """Record what the threads and the transport do from now on."""
        trace = Trace()
        self.transport = Traced(self.transport, trace)
        self.trace = trace
        return trace

    def end_trace(self) -> None:
        """Record no more."""
        if isinstance(self.transport, Traced):
            self.transport = self.transport.transport
        self.trace = None

    # ---- threads and failure -------------------------------------------------------------------

    def _serve(self, name: str, queue: _Queue) -> None:
        free = 0.0  # since when this thread had nothing to do
        while (item := queue.get()) is not None:
            posted, step = item
            trace = self.trace
            begun = None if trace is None else trace.begin()
            try:
                if self.error is None:
                    step()
            except BaseException as error:
                self._fail(error)
            if trace is not None and begun is not None:
                trace.end(begun, name, _describe(step), begun[0] - max(posted, free))
            free = time.perf_counter()
            del item, step  # or the last job would stay alive while this thread waits for the next

    def _fail(self, error: BaseException) -> None:
        """The first error breaks the group: everyone waiting here gets it, and peers are told."""
        with self._lock:
            if self.error is not None or self._failing:
                return  # another thread has met the same, a moment ago
            self._failing = True
        if isinstance(error, GradwireError):
            log.error("%s", error)
        else:
            log.exception("gradwire: a task failed", exc_info=error)
        peer = error.peer if isinstance(error, TransportError) else None
        self.transport.fail(self.transport.rank if peer is None else peer)
        self._break(error)

    def _break(self, error: BaseException) -> None:
        """End every job, now and later, with `error`, unless an earlier one did."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            stranded = [*self._running, *self._waiting]
            self._waiting.clear()
        for run in stranded:
            if not run.future.done():
                run.future.set_exception(error)

    def is_own_thread(self) -> bool:
        """Whether the caller is one of the executor's threads, which must not wait for jobs."""
        return threading.current_thread() in self._threads


def _put(queue: _Queue, function: Callable[..., None], *arguments: object) -> None:
    queue.put((time.perf_counter(), partial(function, *arguments)))


def _describe(step: partial[None]) -> str:
    """A step of a thread in words: what it does, and the task it does it for."""
    name = step.func.__name__.lstrip("_").replace("_", " ")
    run, *rest = step.args
    if rest and isinstance(rest[0], tuple):
        return f"{name}: {len(rest[0])} receives"
    return f"{name}: {run.job.graph.describe(rest[0])}" if rest else name
