"""A trace of what a group's threads did, and when: for profiles and chrome://tracing."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradwire.transport import Transport
from gradwire.transport.protocol import Loan, Pending

WIRE = "wire: "  # prefix of a transport's steps, which lie within steps of a thread


@dataclass(frozen=True)
class Span:
    """One step of one thread.

    Attributes:
        thread: compute, inbound, outbound, or the caller's.
        what: the step, and its task where it has one.
        begin, seconds: wall-clock start (time.perf_counter) and duration.
        cpu_seconds: CPU time of the thread, without the kernels' helper threads.
        queued_seconds: time that the step lay in its queue while the thread was idle.
    """

    thread: str
    what: str
    begin: float
    seconds: float
    cpu_seconds: float
    queued_seconds: float = 0.0


class Timeline:
    """Spans, in the order in which they ended; see `Runs.begin_trace`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._lock = threading.Lock()

    def begin(self) -> tuple[float, float]:
        """Start a step; pass the result to `end`, on the same thread."""
        return time.perf_counter(), time.thread_time()

    def end(
        self, begun: tuple[float, float], thread: str, what: str, queued_seconds: float = 0.0
    ) -> None:
        """Record the end of a step that began with `begin`."""
        seconds, cpu_seconds = time.perf_counter() - begun[0], time.thread_time() - begun[1]
        with self._lock:
            span = Span(thread, what, begun[0], seconds, cpu_seconds, queued_seconds)
            self.spans.append(span)

    def clear(self) -> None:
        """Drop all spans."""
        with self._lock:
            self.spans.clear()

    def rows(self) -> list[dict[str, Any]]:
        """The spans as dictionaries."""
        return [asdict(span) for span in list(self.spans)]

    def chrome(self, rank: int) -> dict[str, Any]:
        """The trace in the JSON format of chrome://tracing and Perfetto; write with json.dump."""
        events = [
            {
                "name": span.what,
                "ph": "X",
                "pid": rank,
                "tid": span.thread,
                "ts": span.begin * 1e6,
                "dur": span.seconds * 1e6,
            }
            for span in list(self.spans)
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}


class Traced:
    """A transport that records its steps, each within a step of the calling thread."""

    def __init__(self, transport: Transport, trace: Timeline) -> None:
        self.transport = transport
        self.trace = trace
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.timeout = transport.timeout
        self.in_memory = transport.in_memory
        self.reached = transport.reached
        self.lenders = transport.lenders
        self.store = transport.store

    @property
    def board(self) -> dist.Store:
        return self.transport.board

    @property
    def shared_bytes(self) -> int:
        return self.transport.shared_bytes

    @property
    def lent_bytes(self) -> int:
        return self.transport.lent_bytes

    def isend(self, data: torch.Tensor, peer: int, tag: int, in_use: int | None = None) -> Pending:
        begun = self.trace.begin()
        pending = self.transport.isend(data, peer, tag, in_use)
        self.trace.end(begun, _thread(), f"{WIRE}post send to rank {peer}")
        return _TracedPending(pending, self.trace, f"{WIRE}send to rank {peer}")

    def irecv(self, data: torch.Tensor, peer: int, tag: int) -> Pending:
        begun = self.trace.begin()
        pending = self.transport.irecv(data, peer, tag)
        self.trace.end(begun, _thread(), f"{WIRE}post receive from rank {peer}")
        return _TracedPending(pending, self.trace, f"{WIRE}receive from rank {peer}")

    def borrow(self, nbytes: int, peer: int, tag: int) -> Loan:
        begun = self.trace.begin()
        loan = self.transport.borrow(nbytes, peer, tag)
        self.trace.end(begun, _thread(), f"{WIRE}post receive from rank {peer}")
        return _TracedLoan(loan, self.trace, f"{WIRE}receive from rank {peer}")

    def fail(self, peer: int) -> None:
        self.transport.fail(peer)

    def longest_wait(self) -> tuple[float, int] | None:
        return self.transport.longest_wait()

    def close(self) -> None:
        self.transport.close()


class _TracedPending:
    def __init__(self, pending: Pending, trace: Timeline, what: str) -> None:
        self.pending = pending
        self.trace = trace
        self.what = what

    def wait(self) -> None:
        begun = self.trace.begin()
        self.pending.wait()
        self.trace.end(begun, _thread(), self.what)


class _TracedLoan:
    def __init__(self, loan: Loan, trace: Timeline, what: str) -> None:
        self.loan = loan
        self.trace = trace
        self.what = what

    def wait(self) -> torch.Tensor:
        begun = self.trace.begin()
        message = self.loan.wait()
        self.trace.end(begun, _thread(), self.what)
        return message

    def give_back(self) -> None:
        self.loan.give_back()


def _thread() -> str:
    return threading.current_thread().name.removeprefix("gradwire-")
