"""A virtual clock, and what takes time on it: cores, and threads that work on them."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

Act = Callable[[], None]


class Clock:
    """Runs acts in the order of their times; those of one time in the order they were made.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._acts: list[tuple[float, int, Act]] = []
        self._made = 0

    def at(self, when: float, act: Act) -> None:
        """Run `act` at `when`, which is not before now."""
        self._made += 1
        heapq.heappush(self._acts, (max(when, self.now), self._made, act))

    def run(self) -> None:
        """Run all acts, and those that they make, until none is left."""
        acts = self._acts
        while acts:
            self.now, _, act = heapq.heappop(acts)
            act()


class Cores:
    """A number of cores that all busy threads share equally, as an operating system does.

    Args:
        count: how many; `inf`: every thread has its own.
    """

    def __init__(self, clock: Clock, count: float = math.inf) -> None:
        self.clock = clock
        self.count = count
        # How much work a thread that was always busy would have done by now; shared equally, all
        # that are busy get on alike, so work that begins here ends that much further on.
        self._done = 0.0
        self._seen = 0.0
        self._ends: list[tuple[float, int, Act]] = []
        self._made = 0
        self._alarm = 0

    def work(self, seconds: float, then: Act) -> None:
        """Call `then` when a core has spent `seconds` on it."""
        if math.isinf(self.count):
            self.clock.at(self.clock.now + seconds, then)
            return
        self._progress()
        self._made += 1
        heapq.heappush(self._ends, (self._done + seconds, self._made, then))
        self._set_alarm()

    @property
    def _speed(self) -> float:
        return min(1.0, self.count / len(self._ends))

    def _progress(self) -> None:
        if self._ends:
            self._done += (self.clock.now - self._seen) * self._speed
        self._seen = self.clock.now

    def _set_alarm(self) -> None:
        self._alarm += 1
        if self._ends:
            left = max(self._ends[0][0] - self._done, 0.0) / self._speed
            alarm = self._alarm
            self.clock.at(self.clock.now + left, lambda: self._ring(alarm))

    def _ring(self, alarm: int) -> None:
        if alarm != self._alarm:
            return  # others began or ended since it was set
        self._progress()
        # The first has ended by construction, whatever rounding says; with it all of its time.
        end, _, first = heapq.heappop(self._ends)
        self._done = max(self._done, end)
        ended = [first]
        while self._ends and self._ends[0][0] <= self._done:
            ended.append(heapq.heappop(self._ends)[2])
        self._set_alarm()
        for then in ended:
            then()


class Thread:
    """Does one thing after the other, on one core at most."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._queue: deque[tuple[float, Act]] = deque()
        self._first: deque[tuple[float, Act]] = deque()
        self._busy = False
        self.seconds = 0.0

    def do(self, seconds: float, then: Act) -> None:
        """Work for `seconds` after all that waits here, then call `then`."""
        self._queue.append((seconds, then))
        if not self._busy:
            self._next()

    def do_first(self, seconds: float, then: Act) -> None:
        """As `do`, but before what waits: what an act that ends now has still to do itself."""
        self._first.append((seconds, then))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        if not (self._first or self._queue):
            return
        seconds, then = (self._first or self._queue).popleft()
        self._busy = True
        self.seconds += seconds
        self._cores.work(seconds, lambda: self._end(then))

    def _end(self, then: Act) -> None:
        then()  # while busy, so that what it adds with `do_first` comes next
        self._busy = False
        self._next()
