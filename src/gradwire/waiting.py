"""Waits that a signal interrupts.

A signal that comes just before the main thread sleeps does not wake it: Python has noted the
signal, and calls its handler only once the thread runs again. So no sleep is long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import TypeVar

from gradwire.errors import again

T = TypeVar("T")

_SLEEP_S = 0.5


def result_of(future: Future[T]) -> T:
    """The result of a future, once it has one; raises its error."""
    until_done(future)
    error = future.exception()
    if error is not None:
        raise again(error)
    return future.result()


def until_done(future: Future[T]) -> None:
    """Wait until a future has a result or an error."""
    while not future.done():
        with suppress(FutureTimeout):
            future.exception(_SLEEP_S)


def until_set(event: threading.Event) -> None:
    """Wait for an event."""
    while not event.wait(_SLEEP_S):
        pass


def until(condition: threading.Condition, holds: Callable[[], bool]) -> None:
    """Wait until `holds()`, which whoever notifies the condition may change; its lock is held."""
    while not condition.wait_for(holds, _SLEEP_S):
        pass
