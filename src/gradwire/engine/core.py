"""The scheduler core: a state machine from events to actions, without threads, I/O or clock.

An *owner* (a handle, an FSDP object, a stream of user calls) issues *tickets*, one per scope. A
ticket is admitted when it is among the `window` oldest that have not been returned; tickets are
issued, admitted and returned in the owner's order, which is the same on every rank. A ticket runs
its rounds one after the other; a *run* is one collective of a round in flight. An admitted ticket
never waits for a younger ticket or for another owner. So the oldest ticket always completes, and
then the next.

Threads (engine/runs.py) and the simulator's clock (gradwire_tools.sim.rank) perform the actions; a
stream follows a schedule instead (engine/stream_driver.py).

A ticket reserves no memory in advance: a round allocates when it begins, without waiting. The
windows bound the memory in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from gradwire.engine.graph import Graph, Kind


class Do(Enum):
    START = "start"  # allocate memory, then report `started`
    POST = "post"  # post these receives; report `done` for each when its message has arrived
    KERNEL = "kernel"  # run this task, then report `done`
    SEND = "send"  # post this send, report `posted`, then `sent` when its memory is free again
    FREE = "free"  # release the run's memory
    RESULT = "result"  # report that the run's values are complete


class Run:
    """One collective in flight; a driver's own have its data.

    Attributes:
        place: its ticket.
        graph: its tasks, once it has begun.
    """

    graph: Graph

    def __init__(self, place: Place) -> None:
        self.place = place

    def begin(self, graph: Graph) -> None:
        self.graph = graph
        self._waits = list(graph.waits)
        self._left = len(self._waits)
        self._sends = graph.kind.count(Kind.SEND)


class Place:
    """A ticket's place in its owner's order; a driver's own have its data.

    Attributes:
        number: its index in the owner's order, from 0, once it is issued.
        admitted: whether its collectives may start.
        closed: whether no further round follows.
    """

    number = -1

    def __init__(self) -> None:
        self.admitted = False
        self.closed = False
        self.queued: deque[Run] = deque()  # runs that start once the ticket is admitted
        self.held = 0  # collectives that are expected, or still hold memory

    @property
    def returned(self) -> bool:
        return self.closed and not self.held


class Action(NamedTuple):
    """What a driver must do for a Run: POST has several tasks, KERNEL and SEND one, others none."""

    do: Do
    run: Any
    tasks: Sequence[int] = ()


Actions = list[Action]
P = TypeVar("P", bound=Place)


class Core:
    """The tickets of one owner. Not thread-safe: its driver makes one call at a time.

    Args:
        window: how many tickets may be admitted at a time, at least 1.
        until_sent: whether a round's result also waits for its sends.
    """

    def __init__(self, window: int, until_sent: bool = False) -> None:
        assert window >= 1
        self.window = window
        self._until_sent = until_sent
        self.issued = 0
        self._places: deque[Place] = deque()  # not returned yet, oldest first

    @property
    def returned(self) -> int:
        """How many tickets, counted from the first, have been returned."""
        return self.issued - len(self._places)

    @property
    def outstanding(self) -> tuple[Place, ...]:
        """The tickets that have not been returned, the oldest first."""
        return tuple(self._places)

    def issue(self, place: P) -> P:
        """Make this the owner's next ticket."""
        place.number = self.issued
        self.issued += 1
        self._places.append(place)
        place.admitted = len(self._places) <= self.window
        return place

    def expect(self, place: Place) -> None:
        """The ticket has another collective, which is begun once prepared, or released."""
        assert not place.closed, "a closed ticket has no further collective"
        place.held += 1

    def release(self, place: Place) -> Actions:
        """An expected collective will not begin; or a stream has run it, by its schedule."""
        place.held -= 1
        return self._return()

    def begin(self, run: Run, graph: Graph) -> Actions:
        """Begin an expected collective."""
        run.begin(graph)
        if run.place.admitted:
            return [Action(Do.START, run)]
        run.place.queued.append(run)
        return []

    def started(self, run: Run) -> Actions:
        """The run's memory is allocated."""
        actions: Actions = []
        for receives, source in run.graph.opening:
            if receives:
                actions.append(Action(Do.POST, run, receives))
            if source is not None:
                actions.append(self._release(run, source))
        return actions if run._left else self._ended(run)

    def done(self, run: Run, task: int) -> Actions:
        """A kernel has run, or a message has arrived."""
        actions = self._dependents(run, task)
        run._left -= 1
        return actions if run._left else actions + self._ended(run)

    def posted(self, run: Run, task: int) -> Actions:
        """A send was handed to the transport."""
        assert run.graph.kind[task] is Kind.SEND
        run._left -= 1
        return [] if run._left else self._ended(run)

    def sent(self, run: Run, task: int) -> Actions:
        """A send's memory may be used again."""
        actions = self._dependents(run, task)
        run._sends -= 1
        if run._left == 0 and run._sends == 0:
            actions += self._ended(run) if self._until_sent else self._freed(run)
        return actions

    def close(self, place: Place) -> Actions:
        """The ticket expects no further collective."""
        place.closed = True
        return self._return()

    def _dependents(self, run: Run, task: int) -> Actions:
        actions: Actions = []
        for dependent in run.graph.dependents[task]:
            run._waits[dependent] -= 1
            if run._waits[dependent] == 0:
                actions.append(self._release(run, dependent))
        return actions

    def _release(self, run: Run, task: int) -> Action:
        sends = run.graph.kind[task] is Kind.SEND
        return Action(Do.SEND if sends else Do.KERNEL, run, (task,))

    def _ended(self, run: Run) -> Actions:
        """Every task is done or posted."""
        if run._sends:
            return [] if self._until_sent else [Action(Do.RESULT, run)]
        freed = self._freed(run)
        # Memory first: a waiter for the result may look at how much memory is held.
        return [*freed[:1], Action(Do.RESULT, run), *freed[1:]]

    def _freed(self, run: Run) -> Actions:
        run.place.held -= 1
        return [Action(Do.FREE, run), *self._return()]

    def _return(self) -> Actions:
        """Return finished tickets, in order, and admit as many new ones."""
        while self._places and self._places[0].returned:
            self._places.popleft()
        actions: Actions = []
        for place in list(self._places)[: self.window]:
            if not place.admitted:
                place.admitted = True
                actions += [Action(Do.START, run) for run in place.queued]
                place.queued.clear()
        return actions
