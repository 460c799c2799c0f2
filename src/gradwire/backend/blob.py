"""Blob mode: compress large float tensors that a backward pass reduces, without knowledge of their
parameters.

A blob is such a tensor. It is compressed as a whole with one codec, as in QNCCL (CGX 4.4): blocks
cross the borders of parameters, and no state is kept from step to step. A backward pass may also
reduce other tensors than gradients of parameters: tensor parallelism reduces those of activations.
So blob mode is off by default.

Random numbers derive from (seed, group, rank, number of the call), so they are reproducible if
calls come in the same order, which torch requires on every rank.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from itertools import count

import torch
import torch.distributed as dist

from gradwire.aggregators import Aggregator
from gradwire.backend.models import Models
from gradwire.backend.scope import in_backward, is_float, lacking, mirrors_backward
from gradwire.backend.work import FutureWork
from gradwire.collectives import AllReduce, ReduceScatter, Request
from gradwire.collectives.calling import begin, flat
from gradwire.engine import Communicator, Outcome
from gradwire.groups import communicator, release
from gradwire.handles.backward import Backward
from gradwire.lang import Codec, rng

log = logging.getLogger("gradwire")


class Blobs:
    """The compressed collectives of one process group in blob mode.

    Args:
        group: the process group.
        models: of the group, which have its settings.
    """

    def __init__(self, group: dist.ProcessGroup, models: Models) -> None:
        self._models = models
        self._group = group
        self._backward = Backward(self._settle, lambda: None, lambda: None)
        self._unwaited: list[FutureWork] = []  # by DDP, in the running backward pass
        self._lock = threading.Lock()
        self._comm: Communicator | None = None
        self._steps = count()
        self._has_kernels = functools.cache(_has_kernels)
        self._totals = {"calls": 0, "wire_bytes": 0, "raw_bytes": 0, "seconds": 0.0}

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
        mirrors = not in_backward() and mirrors_backward()
        if not (mirrors or in_backward()) or not self._has_kernels(tensors[0].device.type):
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
        if codec is None or op is None or not in_backward():
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
        least = max(settings.min_bytes, 1)
        if self._group.size() == 1 or not is_float(tensor) or tensor.nbytes < least:
            return None
        assert not isinstance(settings.codec, Aggregator), "an aggregator needs parameters"
        return settings.codec

    def _start(self, request: Request, result: torch.Tensor, times: int) -> FutureWork:
        """Start a collective that sends all values but the own shard, `times` over."""
        if self._comm is None:  # made on first use, when every rank makes its own
            self._comm = communicator(self._group)
        comm, calls, begun = self._comm, self._comm.backend_calls, time.perf_counter()
        raw_bytes = times * request.values.nbytes * (comm.world_size - 1) // comm.world_size
        name = f"{self._group.group_name}/{request.verb}"
        keys = rng.parameter_keys(self._models.settings.seed, name, comm.rank)
        step = functools.partial(next, self._steps)
        running, found = begin(calls, request, request.verb, None, keys, step)

        def finish(outcome: Outcome) -> None:
            if found.data_ptr() != result.data_ptr():
                result.detach().copy_(found.view(result.shape))
            with self._lock:
                self._totals["calls"] += 1
                self._totals["wire_bytes"] += outcome.wire_bytes
                self._totals["raw_bytes"] += raw_bytes
                self._totals["seconds"] += time.perf_counter() - begun

        return FutureWork(comm, running, finish, [result], self._forgive)

    def _forgive(self, work: FutureWork) -> None:
        """Raise the error of `work` at the end of the running backward pass."""
        self._backward.enter()
        self._unwaited.append(work)

    def _settle(self) -> None:
        unwaited, self._unwaited = self._unwaited, []
        for work in unwaited:
            work.wait()

    def totals(self) -> dict[str, float]:
        """calls, wire_bytes, raw_bytes, seconds: of `Group.stats`; seconds overlap."""
        with self._lock:
            return dict(self._totals)

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
