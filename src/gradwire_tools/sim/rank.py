"""One rank on a virtual clock: the scheduler core, driven by the durations of its actions.

The lanes are those of gradwire.engine.runs: a thread runs kernels in the order in which
their inputs arrive, and posts the sends that they release; each scope's receives are awaited by a
thread of their own, in the order in which they are posted. An aggregator computes on the thread of
its caller before its first round, and then on that of kernels.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

from gradwire.engine import Graph
from gradwire.engine.core import Actions, Core, Do, Place, Run
from gradwire_tools.sim.clock import Clock, Cores, Thread
from gradwire_tools.sim.fabric import Fabric
from gradwire_tools.sim.symmetry import Symmetry

WINDOW = 2  # scopes in flight, of an owner


@dataclass(frozen=True)
class TimedGraph:
    """A collective on one rank: its graph, and the durations of its tasks.

    Attributes:
        graph: as the algorithm built it.
        seconds: kernel time of each task; 0 for sends and receives.
        nbytes: bytes of the message of each buffer, header included.
        largest: bytes of the largest message of all ranks.
        tables: bytes of the length table in the message of each buffer, 0 for most. The table is
            sent over a network but not through memory.
        rotation: the symmetry of all ranks' graphs, if one node represents all.
    """

    graph: Graph
    seconds: Sequence[float]
    nbytes: Sequence[int]
    largest: int
    tables: Sequence[int]
    rotation: Symmetry | None = None


Rounds = Sequence[Sequence[TimedGraph]]  # the collectives of a scope, round by round


@dataclass(frozen=True)
class Overheads:
    """The engine's costs beyond kernels, in seconds.

    Attributes:
        start: per collective, before its first task and after its last.
        task: per kernel or receive, to notice that it is ready and to start it.
        post: per posted send or receive; also per receive whose message has already arrived when
            its thread reaches it, so that no thread has to be woken.
        check: per checked message.
        check_byte: per byte of a checked message.
    """

    start: float = 0.0
    task: float = 0.0
    post: float = 0.0
    check: float = 0.0
    check_byte: float = 0.0


class _Scope(Place):
    """A scope in flight, with its pending receives in order."""

    def __init__(
        self, number: int, rounds: Rounds, computing: Sequence[float], cores: Cores
    ) -> None:
        super().__init__()
        self.given = number
        self.rounds = rounds
        self.computing = computing
        self.round = 0  # the next one
        self.left = 0  # collectives of the present one without a result
        self.inbound, self.outbound = Thread(cores), Thread(cores)
        self.awaited: deque[tuple[Hashable, int, _Run]] = deque()
        self.receiving = False


class _Run(Run):
    """One collective in flight; `name` is its own, equal on all ranks."""

    place: _Scope

    def __init__(self, place: _Scope, part: int, timed: TimedGraph) -> None:
        super().__init__(place)
        self.name = place.given, place.round, part
        self.timed = timed


class SimulatedRank:
    """A rank that averages scopes.

    Args:
        number: the rank.
        node: the index of its node in the fabric.
        clock, cores: on which its threads work.
        fabric: carries its messages.
        window: scopes that may be in flight, as for an owner.

    Attributes:
        ended: per scope, the time in seconds at which its result was in place.
        sent_bytes: per scope, bytes passed to the transport.
        kernel_seconds: time of all kernels and aggregators.
        on_result: called with a scope's number as its result is in place.
    """

    def __init__(
        self,
        number: int,
        node: int,
        clock: Clock,
        cores: Cores,
        fabric: Fabric,
        overheads: Overheads,
        window: int = WINDOW,
    ) -> None:
        self.number = number
        self.node = node
        self.stack = Thread(cores)
        self.ended: dict[int, float] = {}
        self.sent_bytes: Counter[int] = Counter()
        self.kernel_seconds = 0.0
        self.on_result: Callable[[int], None] = _nothing
        self.clock = clock
        self.cores = cores
        self._fabric = fabric
        self._overheads = overheads
        self._core = Core(window)
        self._caller, self._compute = Thread(cores), Thread(cores)
        self._awaiting: dict[Hashable, _Scope] = {}
        self._arrived: set[Hashable] = set()

    def submit(self, number: int, rounds: Rounds, computing: Sequence[float] = ()) -> None:
        """Submit a scope now.

        Args:
            number: its own, equal on all ranks.
            computing: seconds of its aggregators before each round and after the last; (): none.
        """
        computing = computing or [0.0] * (len(rounds) + 1)
        scope = self._core.issue(_Scope(number, rounds, computing, self.cores))
        self._compute_next(scope, self._caller)

    def _compute_next(self, scope: _Scope, thread: Thread) -> None:
        """Compute, then begin the next round."""
        seconds = scope.computing[scope.round]
        self.kernel_seconds += seconds
        if seconds:
            thread.do(seconds + self._overheads.task, partial(self._begin_next, scope))
        else:
            self._begin_next(scope)

    def _begin_next(self, scope: _Scope) -> None:
        """Begin the next round; after the last, the result is in place."""
        if scope.round == len(scope.rounds):
            self.ended[scope.given] = self.clock.now
            self.on_result(scope.given)
            self._perform(self._core.close(scope), self._compute)
            return
        graphs = scope.rounds[scope.round]
        runs = [_Run(scope, part, timed) for part, timed in enumerate(graphs)]
        scope.round, scope.left = scope.round + 1, len(runs)
        for run in runs:
            self._core.expect(scope)
            self._perform(self._core.begin(run, run.timed.graph), self._compute)

    def _perform(self, actions: Actions, thread: Thread) -> None:
        """Perform the core's actions; `thread`, which caused them, posts the sends."""
        o = self._overheads
        for do, run, tasks in actions:
            if do is Do.KERNEL:
                seconds = run.timed.seconds[tasks[0]]
                self.kernel_seconds += seconds
                self._event(self._compute, seconds + o.task, self._core.done, run, tasks[0])
            elif do is Do.SEND:
                thread.do_first(o.post, partial(self._send, run, tasks[0], thread))
            elif do is Do.POST:
                self._compute.do(len(tasks) * o.post, partial(self._expect, run, tasks))
            elif do is Do.START:
                self._event(self._compute, o.start, self._core.started, run)
            elif do is Do.RESULT:
                run.place.left -= 1
                if not run.place.left:
                    self._compute_next(run.place, self._compute)

    def _event(
        self, thread: Thread, seconds: float, event: Callable[..., Actions], *arguments: object
    ) -> None:
        """Report `event` to the core after `seconds` of work on `thread`."""
        thread.do(seconds, lambda: self._perform(event(*arguments), thread))

    def _expect(self, run: _Run, receives: Sequence[int]) -> None:
        for task in receives:
            name = self._fabric.expect(self, run.name, run.graph, task)
            self._awaiting[name] = run.place
            run.place.awaited.append((name, task, run))

    def _send(self, run: _Run, task: int, thread: Thread) -> None:
        nbytes = self._nbytes(run, task)
        self.sent_bytes[run.place.given] += nbytes

        def sent() -> None:
            self._perform(self._core.sent(run, task), run.place.outbound)

        of = run.name, run.graph, task, nbytes, sent, run.timed.rotation
        self._fabric.send(self, *of)
        self._perform(self._core.posted(run, task), thread)

    def arrived(self, message: Hashable) -> None:
        """See gradwire_tools.sim.fabric.Endpoint."""
        self._arrived.add(message)
        self._receive(self._awaiting[message], self._overheads.task)

    def _receive(self, scope: _Scope, begun: float) -> None:
        """Start the next receive, which takes `begun` seconds to begin.

        The receives of a scope end in the order of posting, whatever the order of arrival.
        """
        if scope.receiving or not scope.awaited or scope.awaited[0][0] not in self._arrived:
            return
        name, task, run = scope.awaited.popleft()
        self._arrived.remove(name)
        del self._awaiting[name]
        scope.receiving = True

        def received() -> None:
            self._perform(self._core.done(run, task), scope.inbound)
            scope.receiving = False
            self._receive(scope, o.post)

        o = self._overheads
        scope.inbound.do(begun + o.check + self._nbytes(run, task) * o.check_byte, received)

    def _nbytes(self, run: _Run, task: int) -> int:
        """Bytes of the message of a send or receive."""
        timed = run.timed
        buffers, peer = run.graph.message(task), run.graph.peer[task]
        nbytes, table = (sum(column[b] for b in buffers) for column in (timed.nbytes, timed.tables))
        return nbytes - (table if self._fabric.same_node(self.number, peer) else 0)


def _nothing(job: int) -> None:
    pass
