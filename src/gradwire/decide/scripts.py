"""Decisions are scripts over a log of passes, which all ranks run alike.

A script is a generator. It yields commands, and is sent what they give:

    Passes(n)         records of the next n passes that have ended, oldest first
    NextWindow()          the record of the next pass with which a policy's window has ended
    Tell(key, value)  what each rank tells under this key, in rank order
    Use(make, then)   requests the plan that `make` returns; the first pass that used it

`tried` is made of these: plans take turns, and the slowest rank counts.

A pass only appends its record, and a script reads each pass once and in order, however late it is.
So all ranks carry out the same commands in the same order: of several scripts the one that waited
for the earliest pass goes first, and a `Use` holds up the others until its plan is in force. A
command that fails raises at its yield.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any, Protocol

from gradwire.engine.workers import Workers
from gradwire.planner import Plan
from gradwire.waiting import until

log = logging.getLogger("gradwire")

CLOSING_S = 5.0  # that `detach` waits at most
UNTIMED = 2  # passes of a turn: caches and connections adapt
_POLL_S = 0.2

Make = Callable[[Plan], Plan]


class Detached(BaseException):
    """Ends work of a handle that is being detached: not an error, which work would tell of."""


@dataclass(frozen=True)
class DecidingRank:
    """A rank among those that decide.

    Attributes:
        rank: in the job, for errors.
        index, ranks: of the ranks of its replica.
        replica: there are several under HSDP, with equal values.
        pieces: whether each rank has a shard of every parameter.
    """

    rank: int
    index: int
    ranks: int
    replica: int = 0
    pieces: bool = False

    @property
    def first(self) -> bool:
        """Whether it asks the policy, and speaks for all."""
        return self.index == self.replica == 0

    def sums(self, number: int) -> bool:
        """Whether it sums the averages of a parameter."""
        return self.pieces or number % self.ranks == self.index


class Requested(Protocol):
    """A requested plan, see `Handle.update`."""

    version: int

    @property
    def in_force(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None: ...


@dataclass(frozen=True)
class Pass:
    """A pass that has ended.

    Attributes:
        number: from 1.
        version: of its plan.
        seconds: from its beginning to that of the next.
        span: seconds from its first bucket's readiness to its last average; None: unknown.
        window: what was summed of a policy's window that ended with it.
    """

    number: int
    version: int
    seconds: float
    span: float | None = None
    window: Any = None


@dataclass(frozen=True)
class Passes:
    """Gives a list of `Pass`."""

    count: int


@dataclass(frozen=True)
class NextWindow:
    """Gives a `Pass`."""


@dataclass(frozen=True)
class Tell:
    """Gives a list of values; those of JSON."""

    key: str
    value: Any


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Use:
    """Gives a `Pass`.

    Attributes:
        make: makes the plan of the newest one.
        then: called as that pass has ended, before the next begins, on the same pass on all ranks.
    """

    make: Make
    then: Callable[[], None] = nothing


Command = Passes | NextWindow | Tell | Use
Script = Generator[Command, Any, Any]


def tried(
    key: str,
    plans: Sequence[Make],
    passes: int,
    turns: int = 1,
    measured: Callable[[Pass], float] = lambda one: one.seconds,
    then: Callable[[], None] = nothing,
) -> Script:
    """Have each plan in force for `UNTIMED` passes and `passes` more, in each of some turns.

    Args:
        then: of the first `Use`.

    Returns:
        Of each plan what the slowest rank's median pass took.
    """
    values: list[list[float]] = [[] for _ in plans]
    for number in [*range(len(plans))] * turns:
        yield Use(plans[number], then)
        then = nothing
        yield Passes(UNTIMED - 1)
        values[number] += map(measured, (yield Passes(passes)))
    every = yield Tell(f"{key}/tried", [statistics.median(of) for of in values])
    return [max(of) for of in zip(*every, strict=True)]


@dataclass(eq=False)
class Running:
    """A script that has begun.

    Attributes:
        at: number of the last pass that it has read.
        passes: those after it.
        command: for which it waits.
        update: of a `Use`.
        due: number of the pass with which the wait ends, once that has ended.
    """

    script: Script
    at: int
    passes: deque[Pass] = field(default_factory=deque)
    command: Command = Passes(0)
    update: Requested | None = None
    due: int | None = None

    def add(self, ended: Pass) -> None:
        """Note a pass that has ended."""
        self.passes.append(ended)
        if self.due is None and self._ends_with(ended):
            self.due = ended.number
            if self.update is not None and self.update.in_force:  # or it was refused
                assert isinstance(self.command, Use)
                self.command.then()

    def wait(self, command: Command, update: Requested | None = None) -> None:
        self.command, self.update = command, update
        self.due = next((one.number for one in self.passes if self._ends_with(one)), None)

    def _ends_with(self, one: Pass) -> bool:
        if self.update is not None:
            return one.version >= self.update.version
        if isinstance(self.command, Passes):
            return one.number >= self.at + self.command.count
        return one.window is not None

    def read(self) -> list[Pass] | Pass:
        """What the command gives."""
        found = []
        while self.at != self.due:
            found.append(self.passes.popleft())
            self.at = found[-1].number
        self.due = self.update = None
        return found if isinstance(self.command, Passes) else found[-1]


class Runner:
    """Runs the scripts of a handle, on a thread of the engine's pool while one is due.

    Args:
        tell: what all ranks tell under a key; it calls its third argument while it waits.
        ask: requests a plan.
        check: raises if the group is broken.
        clock: seconds.

    Attributes:
        passes: that have begun.
        closed: whether scripts have been ended.
    """

    def __init__(
        self,
        workers: Workers,
        tell: Callable[[str, Any, Callable[[], None]], list[Any]],
        ask: Callable[[Make], Requested],
        check: Callable[[], None] = nothing,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.passes = 0
        self._clock = clock
        self._workers, self._tell, self._ask, self._check = workers, tell, ask, check
        self._idle = threading.Condition(threading.RLock())
        self._scripts: list[Running] = []
        self._current: Running | None = None
        self._began: float | None = None
        self._busy = self.closed = False

    def start(self, script: Script) -> Running:
        """Begin a script: at the pass where the script is that calls this, or at the running pass,
        which must be the same on all ranks. What it raises is logged."""
        with self._idle:
            one = Running(script, max(self.passes - 1, 0))
            if self._current is not None:
                one.at, one.passes = self._current.at, deque(self._current.passes)
            one.due = one.at
            self._scripts.append(one)
            self._wake()
        return one

    def stop(self, one: Running) -> None:
        """End a script: by another script, or between two passes while none is due."""
        with self._idle:
            if one in self._scripts:
                self._scripts.remove(one)

    def begin(self, version: int, span: float | None = None, window: Any = None) -> None:
        """A pass begins: note the one before, if there is one."""
        now = self._clock()
        with self._idle:
            if self._began is not None:
                ended = Pass(self.passes, version, now - self._began, span, window)
                for one in self._scripts:
                    one.add(ended)
                self._wake()
            self.passes += 1
            self._began = now

    # ---- its end

    def wait(self) -> None:
        """Wait until no script is due."""
        with self._idle:
            until(self._idle, lambda: not self._busy)

    def close(self) -> None:
        """End all scripts: what runs ends at its next command or `check`."""
        with self._idle:
            self.closed = True
            self._scripts.clear()

    def join(self) -> None:
        """After `close`: wait for what runs, up to `CLOSING_S`."""
        with self._idle:
            self._idle.wait_for(lambda: not self._busy, CLOSING_S)

    def check(self) -> None:
        """Raise Detached if it is closed, or if the group is broken what broke it; a script that
        takes long calls it."""
        if self.closed:
            raise Detached
        self._check()

    # ---- in the background

    def _wake(self) -> None:
        if not self._busy and self._due() is not None:
            self._busy = True
            self._workers.run(self._run)

    def _due(self) -> Running | None:
        """The script whose turn it is, if what it waits for is there."""
        if self.closed:
            return None
        updating = [one for one in self._scripts if one.update is not None]
        due = [one for one in updating or self._scripts if one.due is not None]
        return min(due, key=lambda one: one.due or 0, default=None)

    def _run(self) -> None:
        while True:
            with self._idle:
                one = self._current = self._due()
                if one is None:
                    self._busy = False
                    self._idle.notify_all()
                    return
                given = one.read()
            try:
                self._resume(one, given)
            except (StopIteration, Detached):
                self.stop(one)
            except BaseException:
                log.exception("gradwire: background work failed")
                self.stop(one)

    def _resume(self, one: Running, given: Any) -> None:
        """Carry out its commands until one waits for passes."""
        command = one.script.send(given or None)  # None: it begins
        while True:
            try:
                self.check()
                if isinstance(command, Tell):
                    told = self._tell(command.key, command.value, self.check)
                elif isinstance(command, Use):
                    self._use(one, command)
                    return
                else:
                    with self._idle:
                        one.wait(command)
                    return
            except Exception as error:
                command = one.script.throw(error)
            else:
                command = one.script.send(told)

    def _use(self, one: Running, command: Use) -> None:
        with self._idle:  # no pass sees the plan before `then` is known
            update = self._ask(command.make)
            one.wait(command, update)
        try:
            while True:
                try:
                    update.wait(_POLL_S)
                    return
                except FutureTimeout:
                    self.check()
        except BaseException:
            with self._idle:
                one.update = one.due = None
            raise
