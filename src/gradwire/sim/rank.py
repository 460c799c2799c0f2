"""One rank on a virtual clock: the rules of gradwire.engine.executor, step by step.

A thread runs kernels in the order in which their inputs arrive, and posts the sends that they
release. Another awaits receives, job by job, in the order of their graphs. All receives of a job
are posted among its first kernels, and at most `in_flight` jobs own memory at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from gradwire.engine import Graph, Kind
from gradwire.sim.clock import Clock, Cores, Thread


@dataclass(frozen=True)
class Timed:
    """A collective on one rank: its graph, and what its tasks take.

    Attributes:
        graph: as the algorithm built it.
        seconds: of the kernels of each task; 0 of sends and receives.
        nbytes: of the message of each buffer, its header included.
        largest: of the messages of all ranks.
    """

    graph: Graph
    seconds: Sequence[float]
    nbytes: Sequence[int]
    largest: int


@dataclass(frozen=True)
class Overheads:
    """What the engine costs beside kernels.

    Attributes:
        start: seconds that a collective takes before its first task, and after its last.
        task: seconds that a kernel or a receive takes beside its work, to be noticed and begun.
        post: seconds that posting a send or a receive takes.
        check: seconds that checking a message takes, and `check_byte` for each of its bytes.
    """

    start: float = 0.0
    task: float = 0.0
    post: float = 0.0
    check: float = 0.0
    check_byte: float = 0.0


class Post(Protocol):
    """What carries messages between ranks."""

    def expect(self, rank: Rank, job: int, graph: Graph, task: int) -> Hashable:
        """`rank` has posted a receive; the message's name."""
        ...

    def send(
        self,
        rank: Rank,
        job: int,
        graph: Graph,
        task: int,
        nbytes: int,
        sent: Callable[[], None],
    ) -> None:
        """`rank` has posted a send; `sent` is called when its memory is free again."""
        ...


class _Run:
    """One job under way."""

    def __init__(self, number: int, timed: Timed) -> None:
        self.number = number
        self.graph = timed.graph
        self.timed = timed
        self.waits = list(timed.graph.waits)
        self.left = len(timed.graph)
        self.sends_left = timed.graph.kind.count(Kind.SEND)
        self.free = False


class Rank:
    """A rank that runs jobs.

    Args:
        number: the rank.
        node: the machine it is on, as the fabric counts them.
        cores: on which its threads work.
        post: carries its messages.
        in_flight: as of the executor.

    Attributes:
        ended: when each job had its result in place, in seconds.
        sent_bytes: handed to the transport.
        kernel_seconds: of work, all jobs together.
    """

    def __init__(
        self,
        number: int,
        node: int,
        clock: Clock,
        cores: Cores,
        post: Post,
        overheads: Overheads,
        in_flight: int = 2,
    ) -> None:
        self.number = number
        self.node = node
        self.stack = Thread(cores)
        self.ended: dict[int, float] = {}
        self.sent_bytes = 0
        self.kernel_seconds = 0.0
        self._clock = clock
        self._post = post
        self._overheads = overheads
        self._in_flight = in_flight
        self._compute = Thread(cores)
        self._inbound = Thread(cores)
        self._outbound = Thread(cores)
        self._waiting: deque[_Run] = deque()
        self._running: deque[_Run] = deque()  # that hold a place, the oldest first
        self._awaited: deque[tuple[Hashable, _Run, int]] = deque()
        self._here: set[Hashable] = set()
        self._receiving = False

    def submit_at(self, seconds: Sequence[float], jobs: Sequence[Timed]) -> None:
        """Submit `jobs`, each at its time, which does not fall from one to the next."""
        for number, (when, timed) in enumerate(zip(seconds, jobs, strict=True)):
            run = _Run(number, timed)
            self._clock.at(when, partial(self._submit, run))

    def _submit(self, run: _Run) -> None:
        self._waiting.append(run)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._in_flight:
            run = self._waiting.popleft()
            self._running.append(run)
            self._compute.do(self._overheads.start, partial(self._start, run))

    def _start(self, run: _Run) -> None:
        for receives, source in run.graph.opening:
            if receives:
                expect = partial(self._expect, run, receives)
                self._compute.do(len(receives) * self._overheads.post, expect)
            if source is not None:
                self._release(run, source, self._compute)
        if not len(run.graph):
            self._end(run)

    def _expect(self, run: _Run, receives: tuple[int, ...]) -> None:
        for index in receives:
            name = self._post.expect(self, run.number, run.graph, index)
            self._awaited.append((name, run, index))

    def _release(self, run: _Run, index: int, thread: Thread) -> None:
        """Task `index` has all that it needs; `thread` found it out, and posts it if it sends."""
        if run.graph.kind[index] is Kind.SEND:
            thread.do_first(self._overheads.post, lambda: self._send(run, index, thread))
            return
        seconds = run.timed.seconds[index]
        self.kernel_seconds += seconds
        seconds += self._overheads.task
        self._compute.do(seconds, lambda: self._done(run, index, self._compute))

    def _send(self, run: _Run, index: int, thread: Thread) -> None:
        nbytes = run.timed.nbytes[run.graph.message(index)]
        self.sent_bytes += nbytes
        sent = partial(self._sent, run, index)
        self._post.send(self, run.number, run.graph, index, nbytes, sent)
        self._count(run)

    def arrived(self, message: Hashable) -> None:
        """Of gradwire.sim.fabric.End."""
        self._here.add(message)
        self._receive()

    def _receive(self) -> None:
        """Receives end in the order of the graph, whatever has arrived."""
        if self._receiving or not self._awaited or self._awaited[0][0] not in self._here:
            return
        name, run, index = self._awaited.popleft()
        self._here.remove(name)
        self._receiving = True
        nbytes = run.timed.nbytes[run.graph.message(index)]

        def received() -> None:
            self._done(run, index, self._inbound)
            self._receiving = False
            self._receive()

        o = self._overheads
        self._inbound.do(o.task + o.check + nbytes * o.check_byte, received)

    def _done(self, run: _Run, index: int, thread: Thread) -> None:
        self._release_dependents(run, index, thread)
        self._count(run)

    def _release_dependents(self, run: _Run, index: int, thread: Thread) -> None:
        for dependent in run.graph.dependents[index]:
            run.waits[dependent] -= 1
            if run.waits[dependent] == 0:
                self._release(run, dependent, thread)

    def _count(self, run: _Run) -> None:
        """One task less to do; a send counts once it is posted."""
        run.left -= 1
        if run.left == 0:
            self.ended[run.number] = self._clock.now
        self._end(run)

    def _sent(self, run: _Run, index: int) -> None:
        self._release_dependents(run, index, self._outbound)
        run.sends_left -= 1
        self._end(run)

    def _end(self, run: _Run) -> None:
        if run.left == 0 and run.sends_left == 0 and not run.free:
            run.free = True
            self.ended.setdefault(run.number, self._clock.now)
            while self._running and self._running[0].free:
                self._running.popleft()
            self._admit()
