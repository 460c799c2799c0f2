"""One rank on a virtual clock: the scheduler core, driven by the times that its actions take.

The lanes are those of gradwire.engine.thread_driver: a thread runs kernels in the order in which
their inputs arrive, and posts the sends that they release; each scope's receives are awaited by a
thread of their own, in the order of their graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from gradwire.engine import Graph
from gradwire.engine.core import Actions, Core, Do, Run
from gradwire.sim.clock import Clock, Cores, Thread


@dataclass(frozen=True)
class Timed:
    """A collective on one rank: its graph, and what its tasks take.

    Attributes:
        graph: as the algorithm built it.
        seconds: of the kernels of each task; 0 of sends and receives.
        nbytes: of the message of each buffer, its header included.
        largest: of the messages of all ranks.
        tables: of the message of each buffer, what of it says how long its rows are, 0 for most: it
            travels over a network, and not in memory.
    """

    graph: Graph
    seconds: Sequence[float]
    nbytes: Sequence[int]
    largest: int
    tables: Sequence[int]


@dataclass(frozen=True)
class Overheads:
    """What the engine costs beside kernels.

    Attributes:
        start: seconds that a collective takes before its first task, and after its last.
        task: seconds that a kernel or a receive takes beside its work, to be noticed and begun.
        post: seconds that posting a send or a receive takes; or a receive whose message is here
            when its thread comes to it, so that nobody has to be woken.
        check: seconds that checking a message takes, and `check_byte` for each of its bytes.
    """

    start: float = 0.0
    task: float = 0.0
    post: float = 0.0
    check: float = 0.0
    check_byte: float = 0.0


class Post(Protocol):
    """What carries messages between ranks."""

    def beside(self, rank: int, peer: int) -> bool:
        """Whether two ranks are on one node."""
        ...

    def expect(self, rank: SimulatedRank, job: int, graph: Graph, task: int) -> Hashable:
        """`rank` has posted a receive; the message's name."""
        ...

    def send(
        self,
        rank: SimulatedRank,
        job: int,
        graph: Graph,
        task: int,
        nbytes: int,
        sent: Callable[[], None],
    ) -> None:
        """`rank` has posted a send; `sent` is called when its memory is free again."""
        ...


@dataclass
class _Scope:
    """One collective under way: the receives that it awaits, the first of them first."""

    number: int
    timed: Timed
    inbound: Thread
    outbound: Thread
    awaited: deque[tuple[Hashable, int]] = field(default_factory=deque)
    receiving: bool = False


class SimulatedRank:
    """A rank that runs jobs.

    Args:
        number: the rank.
        node: the machine it is on, as the fabric counts them.
        cores: on which its threads work.
        post: carries its messages.
        window: as of an owner.

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
        window: int = 2,
    ) -> None:
        self.number = number
        self.node = node
        self.stack = Thread(cores)
        self.ended: dict[int, float] = {}
        self.sent_bytes = 0
        self.kernel_seconds = 0.0
        self._clock = clock
        self._cores = cores
        self._post = post
        self._overheads = overheads
        self._core = Core(window)
        self._compute = Thread(cores)
        self._awaiting: dict[Hashable, Run] = {}
        self._here: set[Hashable] = set()

    def submit_at(self, seconds: Sequence[float], jobs: Sequence[Timed]) -> None:
        """Submit `jobs`, each at its time, which does not fall from one to the next."""
        for number, (when, timed) in enumerate(zip(seconds, jobs, strict=True)):
            self._clock.at(when, partial(self._submit, number, timed))

    def _submit(self, number: int, timed: Timed) -> None:
        place = self._core.issue()
        self._core.expect(place)
        self._core.close(place)
        scope = _Scope(number, timed, Thread(self._cores), Thread(self._cores))
        _, actions = self._core.begin(place, timed.graph, scope)
        self._perform(actions, self._compute)

    def _perform(self, actions: Actions, thread: Thread) -> None:
        """Do what the core says; `thread` found it out, and posts what is to be sent."""
        o = self._overheads
        for do, run, tasks in actions:
            scope: _Scope = run.job
            if do is Do.KERNEL:
                seconds = scope.timed.seconds[tasks[0]]
                self.kernel_seconds += seconds
                self._event(self._compute, seconds + o.task, self._core.done, run, tasks[0])
            elif do is Do.SEND:
                thread.do_first(o.post, partial(self._send, run, tasks[0], thread))
            elif do is Do.POST:
                self._compute.do(len(tasks) * o.post, partial(self._expect, run, tasks))
            elif do is Do.START:
                self._event(self._compute, o.start, self._core.started, run)
            elif do is Do.RESULT:
                self.ended[scope.number] = self._clock.now

    def _event(
        self, thread: Thread, seconds: float, event: Callable[..., Actions], *arguments: object
    ) -> None:
        """Tell the core when `thread` has worked for so long."""
        thread.do(seconds, lambda: self._perform(event(*arguments), thread))

    def _expect(self, run: Run, receives: Sequence[int]) -> None:
        scope: _Scope = run.job
        for task in receives:
            name = self._post.expect(self, scope.number, run.graph, task)
            self._awaiting[name] = run
            scope.awaited.append((name, task))

    def _send(self, run: Run, task: int, thread: Thread) -> None:
        scope: _Scope = run.job
        nbytes = self._nbytes(run, task)
        self.sent_bytes += nbytes

        def sent() -> None:
            self._perform(self._core.sent(run, task), scope.outbound)

        self._post.send(self, scope.number, run.graph, task, nbytes, sent)
        self._perform(self._core.posted(run, task), thread)

    def arrived(self, message: Hashable) -> None:
        """Of gradwire.sim.fabric.End."""
        self._here.add(message)
        self._receive(self._awaiting[message], self._overheads.task)

    def _receive(self, run: Run, begun: float) -> None:
        """Receives of a scope end in the order of its graph, whatever has arrived; it takes
        `begun` seconds to begin the next."""
        scope: _Scope = run.job
        if scope.receiving or not scope.awaited or scope.awaited[0][0] not in self._here:
            return
        name, task = scope.awaited.popleft()
        self._here.remove(name)
        del self._awaiting[name]
        scope.receiving = True

        def received() -> None:
            self._perform(self._core.done(run, task), scope.inbound)
            scope.receiving = False
            self._receive(run, o.post)

        o = self._overheads
        scope.inbound.do(begun + o.check + self._nbytes(run, task) * o.check_byte, received)

    def _nbytes(self, run: Run, task: int) -> int:
        """Bytes of the message of a send or receive."""
        timed: Timed = run.job.timed
        buffers, peer = run.graph.message(task), run.graph.peer[task]
        nbytes, table = (sum(column[b] for b in buffers) for column in (timed.nbytes, timed.tables))
        return nbytes - (table if self._post.beside(self.number, peer) else 0)
