"""An all-reduce of a fixed set of tensors: prepared once, run every step.

prepare    partition, graph, kernel calls, agreement between ranks
start      fill in addresses and RNG keys, hand the job to the executor
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from gradwire import algorithms
from gradwire.collectives.calls import Calls, Step
from gradwire.collectives.options import Options
from gradwire.engine import HEADER_BYTES, Buffer, Communicator, Kind, Outcome, Task
from gradwire.engine.message import Envelope, align, check, seal
from gradwire.errors import ConfigError
from gradwire.lang import kernels, rng
from gradwire.partition import Spec, partition

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_KEPT = 1024  # more than the buckets of any model, few enough to hold


@dataclass
class Item:
    """One tensor of one call.

    Attributes:
        values: 1-D, contiguous, on the CPU; replaced by the result.
        residual: fp32, as long as `values`, or None.
        keys: from `rng.parameter_keys`.
        step: enters the RNG key, so that no two steps draw the same numbers.
    """

    values: torch.Tensor
    keys: rng.Keys
    step: int
    residual: torch.Tensor | None = None


class AllReduce:
    """An all-reduce of a fixed set of tensors, prepared once and run every step.

    Args:
        comm: the process group's engine.
        specs: the tensors, the same on every rank.
        options: how to run it.

    Raises:
        ConfigError: ranks disagree on the specs or options, or a dtype is not a supported float.
        TransportError: a peer did not answer.

    Attributes:
        wire_bytes: what one run sends from this rank, in bytes, by the algorithm's formula.
        arena_bytes: memory that one run owns: its messages, and the kernels' workspace.
    """

    def __init__(
        self, comm: Communicator, specs: Sequence[Spec], options: Options | None = None
    ) -> None:
        options = options or Options()
        self.comm = comm
        self.specs = tuple(specs)
        self.options = options
        for spec in self.specs:
            if spec.dtype not in DTYPES:
                raise ConfigError(
                    f"{spec.name}: cannot compress {spec.dtype}; float32, float16 and bfloat16 "
                    "can be. Use torch.distributed.all_reduce for other dtypes"
                )
        algorithm = algorithms.get(options.algorithm)
        cut = partition(self.specs, comm.world_size, options.segments)
        self.graph = algorithm.build(comm.rank, comm.world_size, cut.sizes)
        self.wire_bytes: int = algorithm.wire_bytes(comm.rank, comm.world_size, cut.sizes)
        self.plan = comm.agree("a collective", [str(options), *map(str, self.specs)])
        self.sizes = cut.sizes
        self._roles: tuple[str, ...] = algorithm.ROLES
        kinds = list(dict.fromkeys((spec.codec, spec.dtype) for spec in self.specs))
        self.kernels = [kernels(codec, dtype, options.target) for codec, dtype in kinds]

        # Messages lie sorted in the arena, so that what a merge sums stands in rank order.
        self.offsets: dict[Buffer, int] = {}
        end = 0
        for buffer in sorted(self.graph.buffers):
            self.offsets[buffer] = end
            end += align(self.message_bytes(buffer))
        index = {kind: i for i, kind in enumerate(kinds)}
        self.calls = Calls(self.graph, cut.rows, self.specs, index, self.offsets)
        self.threads = options.threads or torch.get_num_threads()
        self.workspace_offset = end
        self.arena_bytes = end + max(
            (
                self.kernels[call.kernel].layout.workspace_nbytes(
                    self.calls.numel[call.first : call.last], self.threads
                )
                for calls in self.calls.of.values()
                for call in calls
            ),
            default=0,
        )

    def message_bytes(self, buffer: Buffer) -> int:
        """With its header."""
        return self.sizes[buffer.segment][buffer.chunk] + HEADER_BYTES

    @property
    def tags(self) -> int:
        """How many tags a run needs."""
        return len(self._roles) * len(self.sizes) * self.comm.world_size

    def tag(self, buffer: Buffer) -> int:
        """A number for `buffer` that both ends compute alike; unique between two given ranks."""
        place = self._roles.index(buffer.role) * len(self.sizes) + buffer.segment
        return place * self.comm.world_size + buffer.chunk

    def start(self, items: Sequence[Item], average: bool) -> Future[Outcome]:
        """Run it on `items` (one for each spec, in order); the values are replaced by the result.

        Args:
            items: this step's tensors.
            average: divide the sum by the world size.

        Returns:
            A future that ends when the result is in place, or with the error that prevented it.

        Raises:
            ConfigError: memory that is not what the spec says; nothing has been sent then.
            TransportError: the group is broken.
        """
        for spec, item in zip(self.specs, items, strict=True):
            _check_memory(spec, "values", item.values, spec.dtype)
            if spec.feedback:
                _check_memory(spec, "residual", item.residual, torch.float32)
            if not 0 <= item.step < 1 << 63:
                raise ConfigError(f"{spec.name}: step is {item.step}, must be 0 or more")
        return self.comm.executor.submit(_Job(self, items, average))


def prepare(comm: Communicator, specs: Sequence[Spec], options: Options | None = None) -> AllReduce:
    """The AllReduce of `specs`, built on first use and kept while it is among those used last.

    Raises:
        ConfigError: as AllReduce.
    """
    key = (tuple(specs), options or Options())
    kept = comm.kept
    with comm.preparing:
        if key not in kept:
            kept[key] = AllReduce(comm, specs, options)
            if len(kept) > _KEPT:
                kept.popitem(last=False)
        kept.move_to_end(key)
        prepared = kept[key]
    assert isinstance(prepared, AllReduce)
    return prepared


class _Job:
    """One run of an AllReduce: what the executor asks for (gradwire.engine.Job)."""

    def __init__(self, collective: AllReduce, items: Sequence[Item], average: bool) -> None:
        self.collective = collective
        self.graph = collective.graph
        self.items = items  # kept alive until the kernels are done with their memory
        self.factor = 1.0 / collective.comm.world_size if average else 1.0
        self.sequence, self.first_tag = collective.comm.sequence(collective.plan, collective.tags)
        self.step = Step(
            values=_column([item.values.data_ptr() for item in items]),
            residuals=_column([_address(item.residual) for item in items]),
            keys=_column([item.keys.own for item in items]),
            shared=_column([item.keys.shared for item in items]),
            steps=_column([item.step for item in items]),
        )

    def start(self) -> None:
        c = self.collective
        self.arena = c.comm.take(c.arena_bytes)
        self.rows = c.calls.table(self.step, self.arena.data_ptr())

    def memory(self, buffer: Buffer) -> torch.Tensor:
        offset = self.collective.offsets[buffer]
        return self.arena[offset : offset + self.collective.message_bytes(buffer)]

    def tag(self, buffer: Buffer) -> int:
        return self.first_tag + self.collective.tag(buffer)

    def compute(self, task: Task) -> None:
        c = self.collective
        comm = c.comm
        merge = task.kind is Kind.MERGE
        stride = _stride([c.offsets[b] for b in task.reads]) if merge else 0
        for call in c.calls.of[task]:
            c.kernels[call.kernel].run(
                call.form,
                self.rows[call.first : call.last],
                ranks=comm.world_size if merge else 1,
                rank=comm.rank if merge else 0,
                stride=stride,
                factor=self.factor if merge else 1.0,
                threads=c.threads,
                workspace=self.arena[c.workspace_offset :],
            )
        for buffer in task.writes:
            seal(self.memory(buffer), self._envelope(buffer))

    def received(self, task: Task) -> None:
        buffer = task.writes[0]
        assert task.peer is not None
        check(self.memory(buffer), self._envelope(buffer), task.peer)

    def _envelope(self, buffer: Buffer) -> Envelope:
        c = self.collective
        checksum = c.options.checksum
        return Envelope(c.plan, self.sequence, buffer.segment, buffer.chunk, checksum)

    def finish(self) -> None:
        self.collective.comm.give(self.arena)
        self.items = ()


def _check_memory(spec: Spec, what: str, tensor: torch.Tensor | None, dtype: torch.dtype) -> None:
    """Kernels get addresses, so this is where wrong memory must be stopped."""
    if tensor is None:
        raise ConfigError(f"{spec.name}: its {what} is missing")
    found = (tensor.numel(), tensor.dtype, tensor.device.type, tensor.is_contiguous())
    if found != (spec.numel, dtype, "cpu", True):
        layout = "contiguous" if tensor.is_contiguous() else "not contiguous"
        raise ConfigError(
            f"{spec.name}: its {what} holds {tensor.numel()} x {tensor.dtype} on {tensor.device}, "
            f"{layout}; it must hold {spec.numel} x {dtype}, contiguous on the CPU"
        )


def _stride(offsets: list[int]) -> int:
    strides = {b - a for a, b in pairwise(offsets)}
    assert len(strides) <= 1, "the payloads that a merge sums stand at equal distances"
    return strides.pop() if strides else 0


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _column(values: list[int]) -> np.ndarray:
    return np.array(values, dtype="u8")
