"""A virtual clock, and the cores and threads that work on it."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

Callback = Callable[[], None]


class Clock:
    """Runs callbacks in order of time; callbacks of the same time run in the order of scheduling.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callback]] = []
        self._sequence = 0

    def at(self, when: float, callback: Callback) -> None:
        """Run `callback` at time `when`, or now if `when` is in the past."""
        self._sequence += 1
        heapq.heappush(self._events, (max(when, self.now), self._sequence, callback))

    def run(self) -> None:
        """Run all callbacks, and those that they schedule, until none is left."""
        events = self._events
        while events:
            self.now, _, callback = heapq.heappop(events)
            callback()


class Cores:
    """Cores that all busy threads share equally, as under an operating system.

    Args:
        count: number of cores; `inf`: one core per thread.
    """

    def __init__(self, clock: Clock, count: float = math.inf) -> None:
        self.clock = clock
        self.count = count
        # Seconds of work that an always busy thread would have done by now. All busy threads
        # progress at the same speed, so work of s seconds that begins now ends at _done + s.
        self._done = 0.0
        self._seen = 0.0
        self._ends: list[tuple[float, int, Callback]] = []
        self._sequence = 0
        self._alarm = 0

    def work(self, seconds: float, then: Callback) -> None:
        """Call `then` after `seconds` of core time."""
        if math.isinf(self.count):
            self.clock.at(self.clock.now + seconds, then)
            return
        self._progress()
        self._sequence += 1
        heapq.heappush(self._ends, (self._done + seconds, self._sequence, then))
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
            self.clock.at(self.clock.now + left, lambda: self._on_alarm(alarm))

    def _on_alarm(self, alarm: int) -> None:
        if alarm != self._alarm:
            return  # work began or ended since the alarm was set
        self._progress()
        # The first has ended by construction, whatever the rounding; so has all work of its time.
        end, _, first = heapq.heappop(self._ends)
        self._done = max(self._done, end)
        ended = [first]
        while self._ends and self._ends[0][0] <= self._done:
            ended.append(heapq.heappop(self._ends)[2])
        self._set_alarm()
        for then in ended:
            then()


class Thread:
    """Runs work items one after the other, on at most one core."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._queue: deque[tuple[float, Callback]] = deque()
        self._first: deque[tuple[float, Callback]] = deque()
        self._busy = False
        self.seconds = 0.0

    def do(self, seconds: float, then: Callback) -> None:
        """Append a work item of `seconds`, which ends with a call of `then`."""
        self._queue.append((seconds, then))
        if not self._busy:
            self._next()

    def do_first(self, seconds: float, then: Callback) -> None:
        """As `do`, but ahead of the queue: for follow-up work of the item that ends now."""
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

    def _end(self, then: Callback) -> None:
        then()  # still busy, so that an item it adds with `do_first` comes next
        self._busy = False
        self._next()
