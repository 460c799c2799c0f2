"""Work: what torch gets for a compressed collective, and how its errors keep their names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.autograd import Variable

from gradwire.collectives.calling import future_on
from gradwire.engine import Communicator, Outcome
from gradwire.engine.cuda_streams import StreamFuture, on
from gradwire.errors import ConfigError, TransportError

NO_BACKWARD = -1  # what autograd calls the running backward where there is none
_NO_TIMEOUT = timedelta(0)

Tensors = torch.futures.Future[list[torch.Tensor]]


class FutureWork(dist.Work):
    """A compressed collective under way.

    Args:
        comm: the group's engine.
        running: ends when the collective does.
        finish: called once it has ended well, on the engine's thread, before anybody who waits
            goes on.
        tensors: what the collective was asked to fill.
        watch: raises errors that DDP would lose.

    Of tensors on a GPU it has ended when it is queued, as torch's work over NCCL has: `wait` makes
    the current stream wait, and so does that of the future.
    """

    def __init__(
        self,
        comm: Communicator,
        running: Future[Outcome],
        finish: Callable[[Outcome], None],
        tensors: list[torch.Tensor],
        watch: Unwaited,
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
        """Until the result is in place.

        Args:
            timeout: at most this long; none, the default, leaves it to the process group's own.

        Raises:
            TransportError: a peer or link failed, or `timeout` passed (the collective goes on).
            CodecError: a payload arrived corrupted.
            ConfigError: called on the engine's own thread, where waiting would never end.
        """
        if not self._ended.done() and self._comm.workers.owns(threading.current_thread()):
            raise ConfigError(
                "wait() was called in a callback on gradwire's own thread, which has the work to "
                "do: wait elsewhere, or chain another callback"
            )
        seconds = timeout.total_seconds()
        try:
            self._ended.result(seconds if seconds > 0 else None)
        except FutureTimeout as error:
            if self._ended.done():
                raise
            raise TransportError(
                f"rank {self._comm.rank}: a compressed collective has not ended within {seconds} "
                "s: a peer is late, or this timeout is too short"
            ) from error
        return True

    def get_future(self) -> Tensors:
        """A future of the tensors.

        During a backward pass (DDP asks for it there) it never holds an error, which DDP would turn
        into one without a name: then the backward pass itself raises what went wrong, at its end.
        """
        forgiving = torch._C._current_graph_task_id() != NO_BACKWARD
        if forgiving:
            self._watch.add(self)
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
        """What went wrong, or None; not before the end."""
        return self._ended.exception() if self._ended.done() else None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()


class Unwaited:
    """Raises, at the end of a backward pass, what went wrong in collectives that DDP waits for."""

    def __init__(self) -> None:
        self._backward = NO_BACKWARD
        self._pending: list[FutureWork] = []

    def add(self, work: FutureWork) -> None:
        """Called in a backward pass."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            # Before DDP's own look at its futures, which it queues with its last bucket.
            Variable._execution_engine.queue_callback(self._settle)
        self._backward = backward
        self._pending.append(work)

    def _settle(self) -> None:
        pending, self._pending = self._pending, []
        for work in pending:
            work.wait()
