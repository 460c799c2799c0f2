"""torch's Work for a compressed collective, which preserves the types of errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.collectives.calling import future_on
from gradwire.engine import Communicator, Outcome
from gradwire.engine.cuda_streams import StreamFuture, on
from gradwire.errors import ConfigError, TransportError
from gradwire.handles.backward import in_backward

_NO_TIMEOUT = timedelta(0)

Tensors = torch.futures.Future[list[torch.Tensor]]


class FutureWork(dist.Work):
    """A compressed collective in flight.

    Args:
        comm: the group's communicator.
        running: ends when the collective does.
        finish: called once it has succeeded, on an engine thread, before waiters resume.
        tensors: the collective's output.
        watch: called in a backward pass, at whose end it raises the error, which DDP would lose.

    For tensors on a GPU it is complete once it is queued, as torch's work over NCCL: `wait`, and
    waiting on its future, make the current stream wait.
    """

    def __init__(
        self,
        comm: Communicator,
        running: Future[Outcome],
        finish: Callable[[Outcome], None],
        tensors: list[torch.Tensor],
        watch: Callable[[FutureWork], None],
    ) -> None:
        super().__init__()
        self._comm = comm
        self._finish = finish
        self._tensors = tensors
        self._watch = watch
        self._stream = comm.pools.stream(tensors[0].device)
        self._ended: Future[None] = StreamFuture(self._stream)
        running.add_done_callback(self._end)

    def _end(self, running: Future[Outcome]) -> None:
        try:
            with on(self._stream):
                self._finish(running.result())
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the result is in place.

        Args:
            timeout: for this wait; by default the process group's.

        Raises:
            TransportError: a peer or link failed, or `timeout` passed (the collective continues).
            CodecError: a payload arrived corrupted.
            ConfigError: called on an engine thread, which would deadlock.
        """
        if not self._ended.done() and self._comm.workers.owns(threading.current_thread()):
            raise ConfigError(
                "wait() was called in a callback on gradwire's own thread, which would deadlock: "
                "wait elsewhere, or chain another callback"
            )
        seconds = timeout.total_seconds()
        try:
            self._ended.result(seconds if seconds > 0 else None)
        except FutureTimeout:
            if self._ended.done():
                raise
            raise TransportError(
                f"rank {self._comm.rank}: a compressed collective has not ended within {seconds} "
                "s: a peer is late, or this timeout is too short"
            ) from None
        return True

    def get_future(self) -> Tensors:
        """A future of the tensors.

        During a backward pass (where DDP calls this) it never holds an error, whose type DDP would
        discard. Instead the backward pass raises the error at its end.
        """
        forgiving = in_backward()
        if forgiving:
            self._watch(self)
        future: Tensors = future_on(self._tensors[0].device)

        def tell(ended: Future[None]) -> None:
            error = ended.exception()
            if error is None or forgiving:
                future.set_result(self._tensors)
            else:
                future.set_exception(error)  # type: ignore[arg-type]

        self._ended.add_done_callback(tell)
        return future

    def is_completed(self) -> bool:
        return self._ended.done()

    def is_success(self) -> bool:
        return self._ended.done() and self._ended.exception() is None

    def exception(self) -> BaseException | None:
        """The error, or None; None before the end."""
        return self._ended.exception() if self._ended.done() else None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()
