"""Which windows a policy decides on, the same on all ranks, where they end faster than it decides.

A window that ends while ranks decide about another one is dropped. It does not end at the same
moment on all ranks, so they agree where to go on: as a round ends each rank tells the first window
that it has not dropped, and keeps windows from then on. The next one is the first that no rank has
dropped. So a window waits, and no more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

W = TypeVar("W")


class Windows(Generic[W]):
    """The windows of one rank, by number, ascending; its methods may be called by two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deciding = False  # ranks decide about a window
        self._asking = False  # this rank has told its `first`, and does not know that of all
        self._open = False  # it knows, and the round has not ended
        self._first = 0  # the least number that no rank has dropped
        self._ended = 0  # one more than the last one that ended
        self._kept: list[tuple[int, W]] = []

    def end(self, number: int, make: Callable[[], W]) -> W | None:
        """A window has ended; returns it if a round is to begin with it."""
        with self._lock:
            self._ended = number + 1
            if number < self._first:
                return None
            if not self._deciding:
                self._deciding = True
                return make()
            if self._asking or (self._open and not self._kept):
                self._kept.append((number, make()))
            return None

    def ask(self) -> int:
        """The first window that this rank has not dropped, to be told to all."""
        with self._lock:
            self._asking = True
            return self._ended

    def know(self, first: int) -> None:
        """Note the most that any rank has told."""
        with self._lock:
            self._asking, self._open, self._first = False, True, first
            self._kept = [one for one in self._kept if one[0] >= first][:1]

    def following(self) -> W | None:
        """The round has ended; the window that the next one begins with, if it has ended."""
        with self._lock:
            self._open = False
            if self._kept:
                return self._kept.pop()[1]
            self._deciding = False
            return None
