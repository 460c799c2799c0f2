"""The driver on threads: performs the scheduler core's actions on the CPU.

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

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from gradwire.engine.core import Actions, Do, Run
from gradwire.engine.graph import Graph
from gradwire.engine.workers import Lane
from gradwire.transport import Transport
from gradwire.transport.protocol import Loan, Pending

if TYPE_CHECKING:
    from gradwire.engine.owner import Owner, Ticket


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


class ThreadDriver:
    """Performs the actions of one process group's owners.

    Args:
        transport: returns the transport.
        compute: the lane of kernels.
        ended: called with each flight whose result is complete.
    """

    def __init__(
        self,
        transport: Callable[[], Transport],
        compute: Lane,
        ended: Callable[[Flight], None],
    ) -> None:
        self._transport = transport
        self._compute = compute
        self._ended = ended

    def begin(self, flight: Flight, work: Work) -> None:
        """Run a collective as soon as its ticket is admitted."""
        flight.work = work
        owner = flight.ticket.owner
        self.tell(owner, lambda: owner.core.begin(flight, work.graph))

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
                self._ended(run)

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
                loan = self._transport().borrow(borrowed, peer, work.tag(task))
                inbound.put(self._borrow, run, task, loan)
            else:
                pending = self._transport().irecv(work.incoming(task), peer, work.tag(task))
                inbound.put(self._receive, run, task, pending)

    def _run_kernel(self, run: Flight, task: int) -> None:
        run.work.compute(task)
        self._event(run, "done", task)

    def _send(self, run: Flight, task: int) -> None:
        work = run.work
        message, nbytes = work.outgoing(task)
        pending = self._transport().isend(message, run.graph.peer[task], work.tag(task), nbytes)
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
