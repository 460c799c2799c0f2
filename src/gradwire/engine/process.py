"""The engine of this process: its threads, and its end of the control channel."""

from __future__ import annotations

import os
import threading
import weakref
from multiprocessing.util import Finalize
from typing import Any

from gradwire.control import Channel
from gradwire.engine.workers import Workers

_END_S = 20.0  # that threads may still take at exit: an operation of torch cannot be interrupted


class Engine:
    """One per process. At exit it closes all communicators while the interpreter still runs, and
    waits for its threads: later, gloo's threads, and any inside torch, would abort the process.

    Attributes:
        communicators: of the process groups in use, which it closes.
        workers: threads for steps that may wait.
        channel: the control channel.
    """

    _current: Engine | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.workers = Workers()
        self.channel = Channel()
        self.communicators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._pid = os.getpid()
        # Unlike atexit's functions, a Finalize also runs in children of multiprocessing.
        Finalize(None, self._end, exitpriority=0)

    def _end(self) -> None:
        for comm in list(self.communicators):
            comm.close()
        self.workers.finish(_END_S)
        self.channel.close()

    @classmethod
    def current(cls) -> Engine:
        """This process's engine, made on first use; a forked child gets one of its own."""
        with cls._lock:
            if cls._current is None or cls._current._pid != os.getpid():
                cls._current = cls()
            return cls._current
