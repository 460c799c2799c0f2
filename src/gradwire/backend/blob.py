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
from collections.abc import Callable

import torch
import torch.distributed as dist

from gradwire.backend.scope import in_backward, is_float, lacking, mirrors_backward
from gradwire.backend.settings import Settings
from gradwire.backend.work import FutureWork, Unwaited
from gradwire.collectives import Item, Operation, Options, prepare
from gradwire.engine import Communicator, Outcome
from gradwire.groups import communicator, release
from gradwire.lang import Codec, rng
from gradwire.partition import Spec

log = logging.getLogger("gradwire")


class Blobs:
    """The compressed collectives of one process group in blob mode.

    Args:
        group: the process group.
        settings: of compression.
    """

    def __init__(self, group: dist.ProcessGroup, settings: Settings) -> None:
        self.settings = settings
        self._group = group
        self._watch = Unwaited()
        self._lock = threading.Lock()
        self._comm: Communicator | None = None
        self._calls = 0
        self._lacking = functools.cache(lacking)
        self._announced = False
        self._totals = {"calls": 0, "wire_bytes": 0, "raw_bytes": 0, "seconds": 0.0}

    def all_reduced(self, tensors: list[torch.Tensor], average: bool | None) -> FutureWork | None:
        """Start the all-reduce of a blob; None if these tensors are not one."""
        if len(tensors) != 1 or average is None or not self._takes(tensors[0]):
            return None
        mirrors = not in_backward() and mirrors_backward()
        if not (mirrors or in_backward()) or not self._has_kernels(tensors[0]):
            return None
        work = self.all_reduce(tensors[0], average)
        if mirrors:
            work.wait()  # outside a backward pass, no callback at its end raises errors
        return work

    def scattered(
        self, output: torch.Tensor, input: torch.Tensor, average: bool | None
    ) -> FutureWork | None:
        """Start the reduce-scatter of a blob; None if `input` is not one."""
        if average is None or not in_backward() or not self._takes(input):
            return None
        if not _are_shards(output, input, self._group.size()) or not self._has_kernels(input):
            return None
        return self.reduce_scatter(output, input, average)

    def _takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of gradients is compressed; equal on every rank."""
        if self._group.size() == 1 or not is_float(tensor) or self.settings.codec is None:
            return False
        return tensor.numel() * tensor.itemsize >= max(self.settings.min_bytes, 1)

    def _has_kernels(self, tensor: torch.Tensor) -> bool:
        """Whether kernels for its device are available; logs a warning once if not."""
        reason = self._lacking(tensor.device.type)
        if reason is not None and not self._announced:
            self._announced = True
            log.warning(
                "gradwire: gradients on %s are sent uncompressed: %s", tensor.device.type, reason
            )
        return reason is None

    def all_reduce(self, tensor: torch.Tensor, average: bool) -> FutureWork:
        """Sum or average `tensor` over the ranks, in place; any layout in memory.

        Raises:
            ConfigError: the ranks' tensors differ in size or dtype.
            TransportError: the group is broken.
        """
        values = tensor.detach().contiguous().view(-1)

        def deliver() -> None:
            if values.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(values.view(tensor.shape))

        raw = 2 * values.nbytes * (self._group.size() - 1) // self._group.size()
        return self._start("all_reduce", values, None, average, raw, deliver, tensor)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, average: bool
    ) -> FutureWork:
        """Sum or average `input` over the ranks; rank n gets the n-th of equal shards.

        Args:
            output: contiguous; may be this rank's shard of `input`.
            input: contiguous, `world_size` times as many values.

        Raises:
            ConfigError, TransportError: as `all_reduce`.
        """
        rank, size = self._group.rank(), self._group.size()
        values, home = input.detach().view(-1), output.detach().view(-1)
        home.copy_(values.view(size, -1)[rank])
        raw = input.nbytes * (size - 1) // size
        return self._start("reduce_scatter", values, home, average, raw, _nothing, output)

    def _start(
        self,
        kind: str,
        values: torch.Tensor,
        home: torch.Tensor | None,
        average: bool,
        raw_bytes: int,
        deliver: Callable[[], None],
        result: torch.Tensor,
    ) -> FutureWork:
        assert isinstance(self.settings.codec, Codec), "a blob was taken that has no codec"
        comm = self._engine()
        begun = time.perf_counter()
        operation = Operation(kind, "avg" if average else "sum")
        spec = Spec(kind, values.numel(), values.dtype, self.settings.codec)
        collective = prepare(comm.backend_calls, [spec], Options(), operation, result.device)
        with self._lock:
            step, self._calls = self._calls, self._calls + 1
        name = f"{self._group.group_name}/{kind}"
        keys = rng.parameter_keys(self.settings.seed, name, comm.rank)
        items = [Item(values, keys, step, None, home)]

        def finish(outcome: Outcome) -> None:
            deliver()
            with self._lock:
                self._totals["calls"] += 1
                self._totals["wire_bytes"] += outcome.wire_bytes
                self._totals["raw_bytes"] += raw_bytes
                self._totals["seconds"] += time.perf_counter() - begun

        return FutureWork(comm, collective.start(items), finish, [result], self._watch)

    def _engine(self) -> Communicator:
        """The group's communicator, made on first use, when every rank makes its own."""
        if self._comm is None:
            self._comm = communicator(self._group)
        return self._comm

    def totals(self) -> dict[str, float]:
        """calls, wire_bytes, raw_bytes, seconds: of `Group.stats`; seconds overlap."""
        with self._lock:
            return dict(self._totals)

    def close(self) -> None:
        """Close the communicator; collectives in flight end with a TransportError."""
        self._comm = None
        release(self._group)


def _nothing() -> None:
    pass


def _are_shards(output: torch.Tensor, input: torch.Tensor, size: int) -> bool:
    return (
        output.is_contiguous()
        and input.is_contiguous()
        and output.dtype == input.dtype
        and input.numel() == size * output.numel()
    )
