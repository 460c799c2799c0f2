"""Work on a CUDA stream, and its future, which completes when the work is queued.

None stands for the CPU, which has no streams: there, work has ended when its call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """A context in which `stream` is current; for None, unlike torch's, it does not start CUDA."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class StreamFuture(Future[T]):
    """A future whose work is on `stream` when its result is set.

    `result` makes the caller's current stream wait for the work that was on `stream` by then;
    callbacks are called with `stream` current.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        super().__init__()
        self._stream = stream
        self._queued: torch.cuda.Event | None = None

    def set_result(self, result: T) -> None:
        if self._stream is not None:
            self._queued = self._stream.record_event()
        super().set_result(result)

    def result(self, timeout: float | None = None) -> T:
        found = super().result(timeout)
        if self._stream is not None and self._queued is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._queued)
        return found

    def add_done_callback(self, fn: Callable[[Future[T]], Any]) -> None:
        def within(future: Future[T]) -> None:
            with on(self._stream):
                fn(future)

        super().add_done_callback(within)
