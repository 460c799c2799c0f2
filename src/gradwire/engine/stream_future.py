"""The future of work that is queued on a stream: it ends when the work is queued.

Who asks for the result has their own stream wait for the work, not themselves; what is to be done
with the result is queued behind the work. Without a stream, on the CPU, it is a plain future.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class StreamFuture(Future[T]):
    """A future whose work is on `stream` when its result is set.

    `result` makes the caller's current stream wait for what `stream` held then; callbacks are
    called with `stream` current.
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
            with torch.cuda.stream(self._stream):  # without effect where there is none
                fn(future)

        super().add_done_callback(within)
