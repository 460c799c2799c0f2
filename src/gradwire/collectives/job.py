"""One round of a prepared collective: its addresses, keys, kernels and messages."""

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
from gradwire.engine import Kind, Ticket
from gradwire.engine.message import Envelope, check, seal
from gradwire.errors import ConfigError
from gradwire.lang import rng
from gradwire.partition import Spec
from gradwire.transport import Loan

if TYPE_CHECKING:
    from gradwire.collectives.prepared import Prepared


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
    """Fulfils gradwire.engine.threads.Work."""

    def __init__(
        self, collective: Prepared, items: Sequence[Item], average: bool, ticket: Ticket
    ) -> None:
        self.ticket = ticket
        self.collective = collective
        self.graph = collective.graph
        self.items = items  # kept alive until the kernels are done with their memory
        self.borrowed: Mapping[int, int] = collective.borrowed
        self.readers = list(collective.program.readers)  # that are left
        self.loans: dict[int, tuple[Loan, torch.Tensor]] = {}
        self.kernel_seconds = 0.0
        on_gpu = collective.device.type == "cuda"
        self.ready = torch.cuda.current_stream(collective.device).record_event() if on_gpu else None
        self.factor = 1.0 / collective.comm.world_size if average else 1.0
        self.sequence = ticket.place.number << 8 | ticket.rounds & 255
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
            nbytes, messages = c.arena_bytes, c.program.arena_bytes
            self.held = StagedMemory(c.comm, c.device, nbytes, messages, self.ready)
        else:
            self.held = HostMemory(c.comm, c.arena_bytes)
        self.rows = c.program.calls.table(self.step, self.held.arena.data_ptr())

    def memory(self, buffer: int) -> torch.Tensor:
        if buffer in self.loans:
            return self.loans[buffer][1]
        return self.held.messages[slice(*self._slice(buffer))]

    def lend(self, buffer: int, loan: Loan, message: torch.Tensor) -> None:
        self.loans[buffer] = loan, message

    def _slice(self, buffer: int) -> tuple[int, int]:
        program = self.collective.program
        return program.offset[buffer], program.offset[buffer] + program.nbytes[buffer]

    def tag(self, task: int) -> int:
        return self.ticket.tag(self.collective.tags, self.graph.slot[task])

    def compute(self, task: int) -> None:
        c = self.collective
        begun = time.perf_counter()
        reads, writes = self.graph.reads[task], self.graph.writes[task]
        distances = self.find(task)
        with self.held.kernels(map(self._slice, reads), map(self._slice, writes)):
            self.run_kernels(task, distances)
        with torch.cuda.device(c.device) if c.device.type == "cuda" else nullcontext():
            for call in c.program.calls.of[task]:
                mark = c.marks[c.program.calls.kernel[call]]
                if mark is not None:
                    mark.check()  # a GPU says afterwards what was wrong
        for buffer in writes:
            seal(self.memory(buffer), self._envelope(buffer))
        self._give_back(task)
        self.kernel_seconds += time.perf_counter() - begun

    def run_kernels(self, task: int, distances: np.ndarray | None) -> None:
        c, g = self.collective, self.graph
        merge, own = g.kind[task] is Kind.MERGE, g.own[task]
        calls = c.program.calls
        for call in calls.of[task]:
            kernel = calls.kernel[call]
            c.kernels[kernel].run(
                calls.form[call],
                self.rows[calls.first[call] : calls.last[call]],
                ranks=len(g.reads[task]) + (own >= 0) if merge else 1,
                rank=own if merge else 0,
                distances=distances,
                factor=self.factor if g.final[task] else 1.0,
                threads=c.threads,
                workspace=self.held.arena[c.program.arena_bytes :],
                mark=c.marks[kernel],
            )

    def find(self, task: int) -> np.ndarray | None:
        """Of a merge, the distances between what it reads; its rows, and a decode's, are told where
        borrowed messages lie."""
        kind, reads = self.graph.kind[task], self.graph.reads[task]
        if kind not in (Kind.MERGE, Kind.DECODE):
            return None
        calls = self.collective.program.calls
        begin = self._address(reads[0]) if reads else 0
        if calls.of[task] and reads and reads[0] in self.loans:
            column = "source" if kind is Kind.MERGE else "payload"
            assert kind is Kind.MERGE or len(reads) == 1, self.graph.describe(task)
            first, last = calls.first[calls.of[task][0]], calls.last[calls.of[task][-1]]
            moved = (begin - self.held.arena.data_ptr()) % (1 << 64)
            self.rows[column][first:last] += np.uint64(moved)
        if kind is Kind.DECODE:
            return None
        return np.array([self._address(buffer) - begin for buffer in reads], dtype="i8")

    def _address(self, buffer: int) -> int:
        """Where kernels read a message."""
        if buffer in self.loans:
            return self.loans[buffer][1].data_ptr()
        return self.held.arena.data_ptr() + self.collective.program.offset[buffer]

    def _give_back(self, task: int) -> None:
        """The borrowed messages that no other task reads."""
        for buffer in self.graph.reads[task]:
            if buffer in self.loans:
                self.readers[buffer] -= 1
                if not self.readers[buffer]:
                    self.loans.pop(buffer)[0].give_back()

    def received(self, task: int) -> None:
        buffer = self.graph.message(task)
        check(self.memory(buffer), self._envelope(buffer), self.graph.peer[task])

    def _envelope(self, buffer: int) -> Envelope:
        c, g = self.collective, self.graph
        place = g.buffer_segment[buffer], g.buffer_chunk[buffer]
        return Envelope(c.plan, self.sequence, *place, self.call, c.program.checksum)

    def finish(self) -> None:
        self.held.give()
        self.items = ()
        del self.held, self.rows  # whoever keeps a job must not keep its memory


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
