"""Blob mode: compress large float tensors that a backward pass reduces, without knowledge of their
parameters.

A blob is such a tensor. It is compressed as a whole with one codec, as in QNCCL (CGX 4.4): blocks
cross the borders of parameters, and no state is kept from step to step. A process group does not
know what a tensor is. But DDP reduces its buckets, and FSDP its shards, from hooks on autograd's
thread; metrics, losses, buffers and clipping norms are reduced outside of it. A backward pass may
also reduce other tensors than gradients of parameters: tensor parallelism reduces those of
activations. So blob mode is off by default.

Random numbers derive from (seed, group, rank, number of the call), so they are reproducible if
calls come in the same order, which torch requires on every rank.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.aggregators import Aggregator
from gradwire.backend.models import Models, lacking
from gradwire.collectives import AllReduce, ReduceScatter, Request
from gradwire.collectives.calling import begin, flat, future_on
from gradwire.collectives.legal import FLOATS
from gradwire.engine import Communicator, Outcome
from gradwire.engine.cuda_streams import StreamFuture, on
from gradwire.errors import ConfigError, TransportError
from gradwire.groups import communicator, release
from gradwire.handles.backward import Backward, in_backward
from gradwire.lang import Codec, rng

log = logging.getLogger("gradwire")

_NO_TIMEOUT = timedelta(0)

Tensors = torch.futures.Future[list[torch.Tensor]]


class Blobs:
    """The compressed collectives of one process group in blob mode.

    Args:
        group: the process group.
        models: of the group, which have its settings.

    Attributes:
        totals: calls, wire_bytes, raw_bytes, seconds: of `Group.stats`; seconds overlap.
    """

    def __init__(self, group: dist.ProcessGroup, models: Models) -> None:
        self.totals: dict[str, float] = defaultdict(float)
        self._models = models
        self._group = group
        self._backward = Backward(self._settle, lambda: None, lambda: None)
        self._unwaited: list[FutureWork] = []  # by DDP, in the running backward pass
        self._lock = threading.Lock()
        self._comm: Communicator | None = None
        self._steps = count()
        self._has_kernels = functools.cache(_has_kernels)

    def all_reduced(self, tensors: list[torch.Tensor], op: str | None) -> FutureWork | None:
        """Start to reduce a blob over the ranks, in place; None if these tensors are not one.

        Args:
            op: "sum", "avg" or None, for any other.

        Raises:
            ConfigError: the ranks' tensors differ in size or dtype.
            TransportError: the group is broken.
        """
        codec = self._codec_of(tensors[0]) if len(tensors) == 1 else None
        if codec is None or op is None:
            return None
        mirrors = not _carries_gradients() and _mirrors_backward()
        if not (mirrors or _carries_gradients()) or not self._has_kernels(tensors[0].device.type):
            return None
        work = self._start(AllReduce(flat(tensors[0]), op, codec=codec), tensors[0], 2)
        if mirrors:
            work.wait()  # outside a backward pass, no callback at its end raises errors
        return work

    def scattered(
        self, output: torch.Tensor, input: torch.Tensor, op: str | None
    ) -> FutureWork | None:
        """Start to reduce a blob over the ranks, of whose equal shards rank n gets the n-th; None
        if `input` is not one.

        Args:
            output: may be this rank's shard of `input`.
            op: as in `all_reduced`.

        Raises:
            ConfigError, TransportError: as `all_reduced`.
        """
        codec, size = self._codec_of(input), self._group.size()
        if codec is None or op is None or not _carries_gradients():
            return None
        shards = output.dtype == input.dtype and input.numel() == size * output.numel()
        shards = shards and output.is_contiguous() and input.is_contiguous()
        if not shards or not self._has_kernels(input.device.type):
            return None
        values, home = flat(input), flat(output)
        home.copy_(values.view(size, -1)[self._group.rank()])
        return self._start(ReduceScatter(values, op, home=home, codec=codec), output, 1)

    def _codec_of(self, tensor: torch.Tensor) -> Codec | None:
        """The codec of a tensor of gradients, equal on every rank; None: it is left alone."""
        settings = self._models.settings
        floats = tensor.layout == torch.strided and tensor.dtype in FLOATS
        if self._group.size() == 1 or not floats or tensor.nbytes < max(settings.min_bytes, 1):
            return None
        assert not isinstance(settings.codec, Aggregator), "an aggregator needs parameters"
        return settings.codec

    def _start(self, request: Request, result: torch.Tensor, times: int) -> FutureWork:
        """Start a collective that sends all values but the own shard, `times` over."""
        if self._comm is None:  # made on first use, when every rank makes its own
            self._comm = communicator(self._group)
        comm, begun = self._comm, time.perf_counter()
        raw_bytes = times * request.values.nbytes * (comm.world_size - 1) // comm.world_size
        name = f"{self._group.group_name}/{request.verb}"
        keys = rng.parameter_keys(self._models.settings.seed, name, comm.rank)
        step = functools.partial(next, self._steps)
        running, found = begin(comm.backend_calls, request, request.verb, None, keys, step)

        def finish(outcome: Outcome) -> None:
            if found.data_ptr() != result.data_ptr():
                result.detach().copy_(found.view(result.shape))
            sent = {"calls": 1, "wire_bytes": outcome.wire_bytes, "raw_bytes": raw_bytes}
            with self._lock:
                for key, value in {**sent, "seconds": time.perf_counter() - begun}.items():
                    self.totals[key] += value

        return FutureWork(comm, running, finish, result, self._forgive)

    def _forgive(self, work: FutureWork) -> None:
        """Raise the error of `work` at the end of the running backward pass."""
        self._backward.enter()
        self._unwaited.append(work)

    def _settle(self) -> None:
        unwaited, self._unwaited = self._unwaited, []
        for work in unwaited:
            work.wait()

    def close(self) -> None:
        """Close the communicator; collectives in flight end with a TransportError."""
        self._comm = None
        release(self._group)


def _has_kernels(device_type: str) -> bool:
    """Whether kernels for such devices are available; logs a warning if not."""
    reason = lacking(device_type)
    if reason is not None:
        log.warning("gradwire: gradients on %s are sent uncompressed: %s", device_type, reason)
    return reason is None


def _carries_gradients() -> bool:
    """Whether the caller runs in a backward pass, but not in a recomputed forward.

    Activation checkpointing recomputes forwards, and double backward builds a graph, both with
    gradients enabled. Their collectives must repeat their earlier results, so they stay
    uncompressed.
    """
    return in_backward() and not torch.is_grad_enabled()


# With `model.join()`, a rank that ran out of data calls this to mirror the others' buckets.
_mirror = getattr(DistributedDataParallel, "_match_all_reduce_for_bwd_pass", None)


def _mirrors_backward() -> bool:
    """Whether the caller mirrors the others' backward pass; only the call stack shows that."""
    frame = sys._getframe()
    while frame is not None and _mirror is not None:
        if frame.f_code is _mirror.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class FutureWork(dist.Work):
    """torch's Work for a compressed collective in flight, which preserves the types of errors.

    Args:
        comm: the group's communicator.
        running: ends when the collective does.
        finish: called once it has succeeded, on an engine thread, before waiters resume.
        output: the collective's.
        watch: called in a backward pass, at whose end it raises the error, which DDP would lose.

    For tensors on a GPU it is complete once it is queued, as torch's work over NCCL: `wait`, and
    waiting on its future, make the current stream wait.
    """

    def __init__(
        self,
        comm: Communicator,
        running: Future[Outcome],
        finish: Callable[[Outcome], None],
        output: torch.Tensor,
        watch: Callable[[FutureWork], None],
    ) -> None:
        super().__init__()
        self._comm, self._output, self._watch = comm, output, watch
        stream = comm.pools.stream(output.device)
        self._ended: Future[None] = StreamFuture(stream)

        def end(running: Future[Outcome]) -> None:
            try:
                with on(stream):
                    finish(running.result())
            except BaseException as error:
                self._ended.set_exception(error)
            else:
                self._ended.set_result(None)

        running.add_done_callback(end)

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
        future: Tensors = future_on(self._output.device)

        def tell(ended: Future[None]) -> None:
            error = ended.exception()
            if error is None or forgiving:
                future.set_result(self.result())
            else:
                future.set_exception(error)  # type: ignore[arg-type]

        self._ended.add_done_callback(tell)
        return future

    def is_completed(self) -> bool:
        return self._ended.done()

    def is_success(self) -> bool:
        return self._ended.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error, or None; None before the end."""
        return self._ended.exception() if self._ended.done() else None

    def result(self) -> list[torch.Tensor]:
        return [self._output]

    def synchronize(self) -> None:
        self.wait()
