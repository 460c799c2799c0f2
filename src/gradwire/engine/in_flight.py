"""Collectives in flight in one process group: each ends once, with its result or with an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from gradwire.engine.core import Actions
from gradwire.engine.stream_driver import StreamDriver, StreamWork
from gradwire.engine.thread_driver import Flight, Outcome, ThreadDriver, Work
from gradwire.engine.trace import Timeline, Traced
from gradwire.engine.workers import Lane, Workers
from gradwire.transport import Transport

if TYPE_CHECKING:
    from gradwire.engine.owner import Owner

T = TypeVar("T")


class InFlight:
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
        self._transport = transport
        self._traced: Traced | None = None
        self._failed = failed
        self._lock = threading.Lock()
        self._under_way: set[Flight] = set()
        self._compute = self.lane("compute")
        self._driver = ThreadDriver(lambda: self._traced or transport(), self._compute, self._ended)

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
        """Begin a collective whose preparation has ended, or end it with the preparation's
        error."""
        if flight.future.done():
            return
        try:
            work = make(ready.result())
        except BaseException as error:
            self._cancel(flight)
            self._end(flight, error)
        else:
            flight.ticket.is_prepared = True
            self._driver.begin(flight, work)

    def queue(self, flight: Flight, stream: StreamDriver, make: Callable[[], StreamWork]) -> None:
        """Queue a collective on a stream. On return it is queued, or has failed, or is about to
        fail with the error that breaks the group."""
        try:
            work = make()
        except Exception as error:
            self._cancel(flight)
            self._end(flight, error)
            return
        try:
            wire_bytes = stream.begin(flight, work)
        except Exception:
            return  # the group breaks, and ends this collective with its error
        except BaseException as error:
            self._end(flight, error)
            raise
        seconds = time.perf_counter() - flight.begun
        self._end(flight, Outcome(seconds, wire_bytes, 0.0, work.kernel_calls))

    def resume(self, function: Callable[..., None], *arguments: object) -> None:
        """Call `function`, which continues a scope, on the compute lane, even after the group has
        broken: `function` checks for that."""
        self._compute.put_always(function, *arguments)

    def tell(self, owner: Owner, event: Callable[[], Actions]) -> None:
        """Report an event to an owner's core, and perform the actions that it returns."""
        self._driver.tell(owner, event)

    def _cancel(self, flight: Flight) -> None:
        """The collective will never begin."""
        owner = flight.ticket.owner
        self.tell(owner, lambda: owner.core.cancel(flight.ticket))

    def _ended(self, flight: Flight) -> None:
        work, seconds = flight.work, time.perf_counter() - flight.begun
        self._end(
            flight, Outcome(seconds, flight.wire_bytes, work.kernel_seconds, work.kernel_calls)
        )

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

    # ---- records -------------------------------------------------------------------------------

    def begin_trace(self) -> Timeline:
        """Start to record the steps of lanes and transport."""
        self.trace = Timeline()
        self._traced = Traced(self._transport(), self.trace)
        return self.trace

    def mark(self, what: str) -> None:
        """Add a mark for the calling thread to the trace, if there is one."""
        if self.trace is not None:
            self.trace.end(self.trace.begin(), threading.current_thread().name, what)

    def end_trace(self) -> None:
        """Stop recording."""
        self.trace = self._traced = None
