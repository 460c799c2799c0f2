"""The collectives in flight in one process group, on threads: each ends once, with its result or an
error.

    compute   one lane per process group: kernels, in the order in which their inputs arrive
    inbound   one lane per ticket: awaits its receives, in the order of their graph
    outbound  one lane per ticket: awaits its sends, whose memory is in use until then

Kernels and waits release the GIL, so they overlap with the backward pass. All receives of a round
are posted among its first kernels, so that a transport that needs both ends ready loses no round
trip. The thread that releases a send posts it: posting does not block.

Waits of different tickets never block each other. Otherwise a rank that awaits results of one
ticket before contributions to another would deadlock with a rank that does the reverse.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch

from gradwire.engine.core import Actions, Do, Run
from gradwire.engine.graph import Graph
from gradwire.engine.stream_driver import StreamDriver, StreamWork
from gradwire.engine.trace import Timeline, Traced
from gradwire.engine.workers import Lane, Workers
from gradwire.transport import Transport
from gradwire.transport.protocol import Loan, Pending

if TYPE_CHECKING:
    from gradwire.engine.owner import Owner, Ticket

T = TypeVar("T")


class Outgoing(NamedTuple):
    """A message (uint8) as it is sent, and its bytes on the wire: the bytes in use, where the peer
    reads it in place."""

    message: torch.Tensor
    nbytes: int


class Work(Protocol):
    """A collective that the driver runs: its memory, kernels and messages.

    Attributes:
        graph: its tasks.
        borrowed: first buffer -> bytes, for messages that are read in the sender's memory.
        kernel_seconds: time in kernels so far, checksums of what they wrote included.
        kernel_calls: calls of kernels so far.
    """

    graph: Graph
    borrowed: Mapping[int, int]
    kernel_seconds: float
    kernel_calls: int

    def start(self) -> None:
        """Allocate memory; called once, when the ticket is admitted."""
        ...

    def outgoing(self, task: int) -> Outgoing:
        """The message of a send; its memory is in use until `finish`."""
        ...

    def incoming(self, task: int) -> torch.Tensor:
        """Memory (uint8) for the message of a receive, which may be shorter."""
        ...

    def lend(self, buffer: int, loan: Loan, message: torch.Tensor) -> None:
        """The borrowed message that begins with `buffer` has arrived; it is given back after its
        last reader."""
        ...

    def tag(self, task: int) -> int:
        """The tag of a send or receive, equal on both ends."""
        ...

    def compute(self, task: int) -> None:
        """Run the kernels of an encode, merge or decode."""
        ...

    def received(self, task: int) -> None:
        """Check a received message; raises CodecError."""
        ...

    def finish(self) -> None:
        """Release memory; called once, when every send and receive has ended."""
        ...


@dataclass(frozen=True)
class Outcome:
    """What a collective took.

    Attributes:
        seconds: from its issue to its result.
        wire_bytes: bytes given to the transport.
        kernel_seconds: time in kernels.
        kernel_calls: calls of kernels.
    """

    seconds: float
    wire_bytes: int
    kernel_seconds: float
    kernel_calls: int


class Flight(Run):
    """A collective in flight, from its issue to its result.

    Attributes:
        work: what the driver runs, once it is prepared.
    """

    work: Work

    def __init__(self, ticket: Ticket, future: Future[Outcome]) -> None:
        super().__init__(ticket)
        self.ticket = ticket
        self.future = future
        self.begun = time.perf_counter()
        self.wire_bytes = 0


class Runs:
    """The collectives in flight of one group.

    Args:
        workers: the thread pool of the lanes.
        transport: returns the transport; called when a collective begins.
        failed: called with what a step raises.

    Attributes:
        error: what ended all collectives, and ends later ones; or None.
        trace: records the steps of lanes and transport; None: no recording.
    """

    def __init__(
        self,
        workers: Workers,
        transport: Callable[[], Transport],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.error: BaseException | None = None
        self.trace: Timeline | None = None
        self._workers = workers
        self._opened = transport
        self._traced: Traced | None = None
        self._failed = failed
        self._lock = threading.Lock()
        self._under_way: set[Flight] = set()
        self._compute = self.lane("compute")

    def __len__(self) -> int:
        return len(self._under_way)

    def lane(self, name: str, owner: Owner | None = None) -> Lane:
        """A lane of the group, or of one owner; it stops when that is broken."""

        def stopped() -> bool:
            return self.error is not None or (owner is not None and owner.error is not None)

        return Lane(self._workers, name, self._failed, lambda: self.trace, stopped)

    # ---- a collective, from its issue to its end -----------------------------------------------

    def expect(self, flight: Flight) -> None:
        """Add a collective; it ends with its result, or with the group's or its owner's error."""
        with self._lock:
            self._under_way.add(flight)
            error = self.error or flight.ticket.owner.error
        if error is not None:
            self._end(flight, error)

    def launch(self, flight: Flight, ready: Future[T], make: Callable[[T], Work]) -> None:
        """Run a collective, whose preparation has ended, as soon as its ticket is admitted; or end
        it with the preparation's error."""
        if flight.future.done():
            return
        try:
            work = make(ready.result())
        except BaseException as error:
            self._release(flight)
            self._end(flight, error)
        else:
            flight.ticket.is_prepared = True
            flight.work, core = work, flight.ticket.owner.core
            self.tell(flight.ticket.owner, lambda: core.begin(flight, work.graph))

    def queue(self, flight: Flight, stream: StreamDriver, make: Callable[[], StreamWork]) -> None:
        """Queue a collective on a stream. On return it is queued, or has failed, or is about to
        fail with the error that breaks the group."""
        assert flight.ticket.admitted, (
            "an older ticket of this owner is under way: rounds run where they are issued"
        )
        try:
            work = make()
        except Exception as error:
            self._release(flight)
            self._end(flight, error)
            return
        try:
            wire_bytes = stream.run(work)
        except Exception:
            return  # the group breaks, and ends this collective with its error
        except BaseException as error:
            self._end(flight, error)
            raise
        self._release(flight)
        seconds = time.perf_counter() - flight.begun
        self._end(flight, Outcome(seconds, wire_bytes, 0.0, work.kernel_calls))

    def resume(self, function: Callable[..., None], *arguments: object) -> None:
        """Call `function`, which continues a scope, on the compute lane, even after the group has
        broken: `function` checks for that."""
        self._compute.put_always(function, *arguments)

    def _release(self, flight: Flight) -> None:
        """The collective holds its ticket no longer: it is queued, or will never begin."""
        owner = flight.ticket.owner
        self.tell(owner, lambda: owner.core.release(flight.ticket))

    def _end(self, flight: Flight, end: Outcome | BaseException) -> None:
        with self._lock:
            if flight not in self._under_way:
                return  # another thread ended it
            self._under_way.discard(flight)
        if isinstance(end, BaseException):
            flight.future.set_exception(end)
        else:
            flight.future.set_result(end)

    def end_all(self, error: BaseException, owner: Owner | None = None) -> bool:
        """End all present and future collectives of the group, or of `owner`; False if an earlier
        error did."""
        with self._lock:
            if self.error is not None or (owner is not None and owner.error is not None):
                return False
            if owner is None:
                self.error = error
            else:
                owner.error = error
            stranded = [f for f in self._under_way if owner in (None, f.ticket.owner)]
        for flight in stranded:
            self._end(flight, error)
        return True

    # ---- the core's actions --------------------------------------------------------------------

    def tell(self, owner: Owner, event: Callable[[], Actions]) -> None:
        """Report an event to an owner's core, and perform or queue the actions that it returns.

        Runs start in the order of the core's actions, whichever thread reports: all ranks must post
        the receives of a ticket in the same order.
        """
        with owner.lock:
            actions = event()
            for action in actions:
                if action.do is Do.START:
                    self._compute.put(self._start, action.run)
            if any(action.do is Do.FREE for action in actions):
                owner.forget()
        for action in actions:
            run: Flight = action.run
            if action.do is Do.KERNEL:
                self._compute.put(self._run_kernel, run, action.tasks[0])
            elif action.do is Do.SEND:
                self._send(run, action.tasks[0])
            elif action.do is Do.POST:
                self._compute.put(self._expect, run, tuple(action.tasks))
            elif action.do is Do.FREE:
                run.work.finish()
            elif action.do is Do.RESULT:
                work, seconds = run.work, time.perf_counter() - run.begun
                of = seconds, run.wire_bytes, work.kernel_seconds, work.kernel_calls
                self._end(run, Outcome(*of))

    def _event(self, run: Flight, name: str, *arguments: int) -> None:
        owner = run.ticket.owner
        self.tell(owner, lambda: getattr(owner.core, name)(run, *arguments))

    def _start(self, run: Flight) -> None:
        run.work.start()
        self._event(run, "started")

    def _expect(self, run: Flight, receives: tuple[int, ...]) -> None:
        """Post these receives."""
        work, inbound = run.work, run.ticket.lanes.inbound
        for task in receives:
            buffer, peer = run.graph.writes[task][0], run.graph.peer[task]
            borrowed = work.borrowed.get(buffer)
            if borrowed is not None:
                loan = self._transport.borrow(borrowed, peer, work.tag(task))
                inbound.put(self._borrow, run, task, loan)
            else:
                pending = self._transport.irecv(work.incoming(task), peer, work.tag(task))
                inbound.put(self._receive, run, task, pending)

    def _run_kernel(self, run: Flight, task: int) -> None:
        run.work.compute(task)
        self._event(run, "done", task)

    def _send(self, run: Flight, task: int) -> None:
        work = run.work
        message, nbytes = work.outgoing(task)
        pending = self._transport.isend(message, run.graph.peer[task], work.tag(task), nbytes)
        run.wire_bytes += nbytes
        run.ticket.lanes.outbound.put(self._sent, run, task, pending)
        self._event(run, "posted", task)

    def _borrow(self, run: Flight, task: int, loan: Loan) -> None:
        run.work.lend(run.graph.writes[task][0], loan, loan.wait())
        run.work.received(task)
        self._event(run, "done", task)

    def _receive(self, run: Flight, task: int, pending: Pending) -> None:
        pending.wait()
        run.work.received(task)
        self._event(run, "done", task)

    def _sent(self, run: Flight, task: int, pending: Pending) -> None:
        pending.wait()
        self._event(run, "sent", task)

    @property
    def _transport(self) -> Transport | Traced:
        return self._traced or self._opened()

    # ---- records -------------------------------------------------------------------------------

    def begin_trace(self) -> Timeline:
        """Start to record the steps of lanes and transport."""
        self.trace = Timeline()
        self._traced = Traced(self._opened(), self.trace)
        return self.trace

    def mark(self, what: str) -> None:
        """Add a mark for the calling thread to the trace, if there is one."""
        if self.trace is not None:
            self.trace.end(self.trace.begin(), threading.current_thread().name, what)

    def end_trace(self) -> None:
        """Stop recording."""
        self.trace = self._traced = None
