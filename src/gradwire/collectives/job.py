"""One run of a prepared collective: what the executor asks for."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradwire.collectives.calls import Step
from gradwire.collectives.memory import HostMemory, Memory, StagedMemory, is_staged
from gradwire.engine import Buffer, Kind, Task
from gradwire.engine.message import Envelope, check, seal
from gradwire.errors import ConfigError
from gradwire.lang import rng
from gradwire.partition import Spec
from gradwire.transport import Loan

if TYPE_CHECKING:
    from gradwire.collectives.prepared import Collective


@dataclass
class Item:
    """One tensor of one call.

    Attributes:
        values: 1-D, contiguous, on the collective's device; replaced by the result, unless there is
            a `home`.
        residual: fp32, as long as `values`, or None.
        keys: from `rng.parameter_keys`.
        step: enters the RNG key, so that no two steps draw the same numbers.
        home: of a reduce-scatter: this rank's shard of the values, replaced by the result in place
            of what `values` hold of it; `values` are then only read.
    """

    values: torch.Tensor
    keys: rng.Keys
    step: int
    residual: torch.Tensor | None = None
    home: torch.Tensor | None = None


class Job:
    """Fulfils gradwire.engine.Job."""

    def __init__(self, collective: Collective, items: Sequence[Item], average: bool) -> None:
        self.collective = collective
        self.graph = collective.graph
        self.items = items  # kept alive until the kernels are done with their memory
        self.borrowed: Mapping[Buffer, int] = collective.borrowed
        self.readers = dict(collective.readers)  # that are left
        self.loans: dict[Buffer, tuple[Loan, torch.Tensor]] = {}
        self.kernel_seconds = 0.0
        on_gpu = collective.device.type == "cuda"
        self.ready = torch.cuda.current_stream(collective.device).record_event() if on_gpu else None
        self.factor = 1.0 / collective.comm.world_size if average else 1.0
        self.sequence, self.first_tag = collective.comm.sequence(collective.plan, collective.tags)
        columns = zip(*map(self._numbers, items), strict=True)
        numbers = np.fromiter(chain.from_iterable(columns), "u8", len(Step._fields) * len(items))
        self.step = Step(*numbers.reshape(len(Step._fields), -1))
        # What every rank must have given alike; the message's header carries it.
        alike = self.step.shared.tobytes() + self.step.steps.tobytes() + bytes([average])
        self.call = zlib.crc32(alike)

    def _numbers(self, item: Item) -> tuple[int, ...]:
        """What a Step has of an item, in its order."""
        values = home = item.values.data_ptr()
        residual = 0 if item.residual is None else item.residual.data_ptr()
        if item.home is not None:  # where `values` would begin if `home` stood among them
            before = self.collective.comm.rank * item.home.numel() * item.home.itemsize
            home = (item.home.data_ptr() - before) % (1 << 64)
        return values, residual, home, item.keys.own, item.keys.shared, item.step

    def start(self) -> None:
        c = self.collective
        self.held: Memory
        if is_staged(c.device):
            nbytes, messages = c.arena_bytes, c.workspace_offset
            self.held = StagedMemory(c.comm, c.device, nbytes, messages, self.ready)
        else:
            self.held = HostMemory(c.comm, c.arena_bytes)
        self.rows = c.calls.table(self.step, self.held.arena.data_ptr())

    def memory(self, buffer: Buffer) -> torch.Tensor:
        if buffer in self.loans:
            return self.loans[buffer][1]
        return self.held.messages[slice(*self._slice(buffer))]

    def lend(self, buffer: Buffer, loan: Loan, message: torch.Tensor) -> None:
        self.loans[buffer] = loan, message

    def _slice(self, buffer: Buffer) -> tuple[int, int]:
        offset = self.collective.offsets[buffer]
        return offset, offset + self.collective.message_bytes(buffer)

    def tag(self, buffer: Buffer) -> int:
        return self.first_tag + self.collective.tag(buffer)

    def compute(self, task: Task) -> None:
        c = self.collective
        begun = time.perf_counter()
        distances = self.find(task)
        with self.held.kernels(map(self._slice, task.reads), map(self._slice, task.writes)):
            self.run_kernels(task, distances)
        with torch.cuda.device(c.device) if c.device.type == "cuda" else nullcontext():
            for call in c.calls.of[task]:
                mark = c.marks[call.kernel]
                if mark is not None:
                    mark.check()  # a GPU says afterwards what was wrong
        for buffer in task.writes:
            seal(self.memory(buffer), self._envelope(buffer))
        self._give_back(task)
        self.kernel_seconds += time.perf_counter() - begun

    def run_kernels(self, task: Task, distances: np.ndarray | None) -> None:
        c = self.collective
        merge = task.kind is Kind.MERGE
        for call in c.calls.of[task]:
            c.kernels[call.kernel].run(
                call.form,
                self.rows[call.first : call.last],
                ranks=len(task.reads) + (task.own is not None) if merge else 1,
                rank=(-1 if task.own is None else task.own) if merge else 0,
                distances=distances,
                factor=self.factor if task.final else 1.0,
                threads=c.threads,
                workspace=self.held.arena[c.workspace_offset :],
                mark=c.marks[call.kernel],
            )

    def find(self, task: Task) -> np.ndarray | None:
        """Of a merge, the distances between what it reads; its rows, and a decode's, are told where
        borrowed messages lie."""
        if task.kind not in (Kind.MERGE, Kind.DECODE):
            return None
        places = np.array([self._address(buffer) for buffer in task.reads], dtype="u8")
        calls = self.collective.calls.of[task]
        if calls and task.reads and task.reads[0] in self.loans:
            column = "source" if task.kind is Kind.MERGE else "payload"
            assert task.kind is Kind.MERGE or len(task.reads) == 1, task
            moved = places[:1] - np.uint64(self.held.arena.data_ptr())
            self.rows[calls[0].first : calls[-1].last][column] += moved
        return (places - places[:1]).view("i8") if task.kind is Kind.MERGE else None

    def _address(self, buffer: Buffer) -> int:
        """Where kernels read a message."""
        if buffer in self.loans:
            return self.loans[buffer][1].data_ptr()
        return self.held.arena.data_ptr() + self.collective.offsets[buffer]

    def _give_back(self, task: Task) -> None:
        """The borrowed messages that no other task reads."""
        for buffer in task.reads:
            if buffer in self.loans:
                self.readers[buffer] -= 1
                if not self.readers[buffer]:
                    self.loans.pop(buffer)[0].give_back()

    def received(self, task: Task) -> None:
        buffer = task.writes[0]
        assert task.peer is not None
        check(self.memory(buffer), self._envelope(buffer), task.peer)

    def _envelope(self, buffer: Buffer) -> Envelope:
        c, place = self.collective, (buffer.segment, buffer.chunk)
        return Envelope(c.plan, self.sequence, *place, self.call, c.checksum)

    def finish(self) -> None:
        self.held.give()
        self.items = ()


def check_item(spec: Spec, item: Item, world_size: int, device: torch.device) -> None:
    """Kernels get addresses, so this is where wrong memory must be stopped; raises ConfigError."""
    _check_memory(spec, "values", item.values, spec.numel, spec.dtype, device)
    if spec.feedback:
        _check_memory(spec, "residual", item.residual, spec.numel, torch.float32, device)
    if item.home is not None:
        _check_memory(spec, "shard", item.home, spec.numel // world_size, spec.dtype, device)
    if not 0 <= item.step < 1 << 63:
        raise ConfigError(f"{spec.name}: step is {item.step}, must be 0 or more")


def _check_memory(
    spec: Spec,
    what: str,
    tensor: torch.Tensor | None,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if tensor is None:
        raise ConfigError(f"{spec.name}: its {what} is missing")
    found = (tensor.numel(), tensor.dtype, tensor.device, tensor.is_contiguous())
    if found != (numel, dtype, device, True):
        layout = "contiguous" if tensor.is_contiguous() else "not contiguous"
        raise ConfigError(
            f"{spec.name}: its {what} holds {tensor.numel()} x {tensor.dtype} on {tensor.device}, "
            f"{layout}; it must hold {numel} x {dtype}, contiguous on {device}"
        )
