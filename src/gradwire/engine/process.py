"""The engine of this process: its threads, and its end of the control channel."""

from __future__ import annotations

import os
import threading

from gradwire.control import Channel
from gradwire.engine.workers import Workers


class Engine:
    """One per process.

    Attributes:
        workers: threads for what may wait.
        channel: how ranks tell each other things beside the data.
    """

    _current: Engine | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.workers = Workers()
        self.channel = Channel()
        self._pid = os.getpid()

    @classmethod
    def current(cls) -> Engine:
        """This process's engine, made on first use; a forked child gets one of its own."""
        with cls._lock:
            if cls._current is None or cls._current._pid != os.getpid():
                cls._current = cls()
            return cls._current
