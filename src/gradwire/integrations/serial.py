"""Background work of a handle, one after the other."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from gradwire.engine.workers import Workers
from gradwire.waiting import until

log = logging.getLogger("gradwire")

CLOSING_S = 5.0  # that `detach` waits at most


class Detached(BaseException):
    """Ends work of a handle that is being detached: not an error, which work would tell of."""


class Serial:
    """Runs what it is given on a thread of the pool, in the order given.

    Ranks that submit the same work at the same passes so exchange messages, and request updates of
    their plans, in the same order.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._waiting: deque[Callable[[], None]] = deque()
        self._idle = threading.Condition()
        self._busy = False
        self._closed = False

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` after all that was submitted before; what it raises is logged."""
        with self._idle:
            if self._closed:
                return
            self._waiting.append(work)
            if self._busy:
                return
            self._busy = True
        self._workers.run(self._run)

    def wait(self) -> None:
        """Wait until all is done."""
        with self._idle:
            until(self._idle, lambda: not self._busy)

    def close(self) -> None:
        """Drop what has not begun; what runs ends at its next `check`."""
        with self._idle:
            self._closed = True
            self._waiting.clear()

    def check(self) -> None:
        """Raise Detached if it is closed; work that takes long, or waits for ranks, calls it."""
        if self._closed:
            raise Detached

    def join(self) -> None:
        """After `close`: wait for what runs, up to `CLOSING_S`."""
        with self._idle:
            self._idle.wait_for(lambda: not self._busy, CLOSING_S)

    def _run(self) -> None:
        while True:
            with self._idle:
                if not self._waiting:
                    self._busy = False
                    self._idle.notify_all()
                    return
                work = self._waiting.popleft()
            try:
                with suppress(Detached):
                    work()
            except BaseException:
                log.exception("gradwire: background work failed")
