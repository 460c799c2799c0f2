"""One run of a prepared collective: its addresses, keys, kernels and messages."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradwire.collectives.calls import Step
from gradwire.collectives.memory import Memory, Slice, StagedMemory, is_staged
from gradwire.engine import Communicator, Kind, Ticket
from gradwire.engine.message import Envelope, check, seal, version_of
from gradwire.engine.runs import Outgoing
from gradwire.errors import ConfigError
from gradwire.lang import rng
from gradwire.lang.call import check_memory
from gradwire.partition import Spec
from gradwire.transport import Loan

if TYPE_CHECKING:
    from gradwire.collectives.prepared import Prepared


@dataclass
class Item:
    """One tensor of one call.

    Attributes:
        values: 1-D, contiguous, on the collective's device, `Spec.extent` elements; the result
            replaces them, unless there is a `home`.
        residual: fp32, `Spec.numel` elements, or None.
        keys: from `rng.parameter_keys`.
        step: part of the RNG key, so that no two steps draw the same numbers.
        home: for a reduce-scatter, this rank's shard, used instead of the shard in `values`; the
            result replaces it. `values` are only read, except by an algorithm in two levels.
    """

    values: torch.Tensor
    keys: rng.Keys
    step: int
    residual: torch.Tensor | None = None
    home: torch.Tensor | None = None


@dataclass
class Lent:
    """A message that is read in the sender's memory; `left`: how many of its buffers have readers
    left."""

    loan: Loan
    message: torch.Tensor
    left: int


class Job:
    """A gradwire.engine.runs.Work."""

    def __init__(self, collective: Prepared, items: Sequence[Item], ticket: Ticket) -> None:
        self.ticket = ticket
        self.collective = collective
        self.graph = collective.graph
        self.items = items  # keeps memory alive until the kernels have ended
        self.borrowed: Mapping[int, int] = collective.borrowed
        self.lent: dict[int, tuple[Lent, torch.Tensor]] = {}  # buffer -> its message, and itself
        self.readers: list[int] | None = None  # left, per buffer, once a message is borrowed
        self.kernel_seconds = 0.0
        self.kernel_calls = 0
        on_gpu = collective.device.type == "cuda"
        self.ready = torch.cuda.current_stream(collective.device).record_event() if on_gpu else None
        averages = collective.operation.op == "avg"
        self.factor = 1.0 / collective.comm.world_size if averages else 1.0
        self.sequence = ticket.number << 8 | ticket.rounds & 255
        self.step = self._step(collective.specs, items)
        # Message headers carry the digest of arguments that must be equal on all ranks.
        self.call = zlib.crc32(self.step.shared.tobytes() + self.step.steps.tobytes())

    def _step(self, specs: Sequence[Spec], items: Sequence[Item]) -> Step:
        """The items' memory, keys and steps."""
        values = [item.values.data_ptr() for item in items]
        residuals = [0 if i.residual is None else i.residual.data_ptr() for i in items]
        columns = (
            values,
            residuals,
            map(self._home, specs, items, values),
            [item.keys.own for item in items],
            [item.keys.shared for item in items],
            [item.step for item in items],
        )
        numbers = np.fromiter(chain.from_iterable(columns), "u8", len(columns) * len(items))
        return Step(*numbers.reshape(len(columns), -1))

    def _home(self, spec: Spec, item: Item, values: int) -> int:
        """The address at which its values would begin if `home` were part of them."""
        if item.home is None:
            return values
        comm = self.collective.comm
        _, _, at = spec.shards(comm.world_size)[comm.rank]
        return (item.home.data_ptr() - at * item.home.itemsize) % (1 << 64)

    def start(self) -> None:
        c = self.collective
        self.held: Memory
        if is_staged(c.device):
            nbytes, messages = c.arena_bytes, c.program.arena_bytes
            self.held = StagedMemory(c.comm, c.device, nbytes, messages, self.ready)
        else:
            self.held = Memory(c.pool, c.arena_bytes)
        self._fill()

    def _fill(self) -> None:
        """Make the table of rows, and bind the kernels to it; memory is allocated."""
        program, arena = self.collective.program, self.held.arena
        self.rows = program.calls.table(self.step, arena.data_ptr())
        workspace = arena[program.arena_bytes :]
        self.series = self.collective.series.bind(self.rows, workspace, self.factor)

    def memory(self, *buffers: int) -> torch.Tensor:
        if self.lent and buffers[0] in self.lent:
            lent, only = self.lent[buffers[0]]
            return only if len(buffers) == 1 else lent.message
        first, last = self._slice(buffers[0])[0], self._slice(buffers[-1])[1]
        return self.held.messages[first:last]

    def outgoing(self, task: int) -> Outgoing:
        message = self.memory(*self.collective.message[task])
        return Outgoing(message, message.numel())

    def incoming(self, task: int) -> torch.Tensor:
        return self.memory(*self.collective.message[task])

    def lend(self, buffer: int, loan: Loan, message: torch.Tensor) -> None:
        program, graph = self.collective.program, self.graph
        if self.readers is None:
            self.readers = list(program.readers)
        buffers = graph.writes[graph.writer[buffer]]
        lent, at = Lent(loan, message, len(buffers)), 0
        for each in buffers:
            self.lent[each] = lent, message[at : at + program.nbytes[each]]
            at += program.nbytes[each]

    def _give_back(self, buffers: Sequence[int]) -> None:
        """A task has read these buffers: give back borrowed messages without further readers."""
        assert self.readers is not None
        for buffer in buffers:
            if buffer in self.lent:
                self.readers[buffer] -= 1
                if not self.readers[buffer]:
                    lent, _ = self.lent.pop(buffer)
                    lent.left -= 1
                    if not lent.left:
                        lent.loan.give_back()

    def _slice(self, buffer: int) -> Slice:
        program = self.collective.program
        return program.offset[buffer], program.offset[buffer] + program.nbytes[buffer]

    def _stretches(self, buffers: Sequence[int]) -> Iterator[Slice]:
        """The slices of buffers, adjacent ones joined; computed lazily."""
        first = last = 0
        for begin, end in map(self._slice, buffers):
            if begin != last:
                if last:
                    yield first, last
                first = begin
            last = end
        if last:
            yield first, last

    def tag(self, task: int) -> int:
        return self.ticket.tag(self.collective.tags, self.collective.slot[task])

    def compute(self, task: int) -> None:
        c = self.collective
        begun = time.perf_counter()
        reads, writes = self.graph.reads[task], self.graph.writes[task]
        distances = self.find(task)
        with self.held.kernels(self._stretches(reads), self._stretches(writes)):
            self.run_kernels(task, distances)
        with torch.cuda.device(c.device) if c.device.type == "cuda" else nullcontext():
            for call in c.program.calls.of[task]:
                mark = c.marks[c.program.calls.kernel[call]]
                if mark is not None:
                    mark.check()  # a GPU reports bad payloads after the kernel
        for buffers in c.together[task]:
            self._seal(buffers)
        if self.lent:
            self._give_back(reads)
        self.kernel_seconds += time.perf_counter() - begun

    def _seal(self, buffers: tuple[int, ...]) -> None:
        """Write the headers of adjacent buffers."""
        envelope, message = self._envelope(buffers[0]), self.memory(*buffers)
        if len(buffers) > 1:
            headers = self.collective.headers(buffers, self._envelope)
            headers.seal(message.numpy(), envelope, self.ticket.version)
        else:
            seal(message, envelope, self.ticket.version)

    def run_kernels(self, task: int, distances: np.ndarray | None) -> None:
        calls = self.collective.program.calls.of[task]
        self.kernel_calls += self.series.run(calls.start, calls.stop, distances)

    def find(self, task: int) -> np.ndarray | None:
        """Find what a kernel reads: returns a merge's distances between payloads (and the payloads'
        origins, see lang/call.py), and fills the addresses of borrowed messages into the rows of a
        merge or decode."""
        kind, reads = self.graph.kind[task], self.graph.reads[task]
        if kind not in (Kind.MERGE, Kind.DECODE):
            return None
        calls = self.collective.program.calls
        begin = self._address(reads[0]) if reads else 0
        if calls.of[task] and reads and reads[0] in self.lent:
            # borrowed buffers have the same relative offsets as here; a decode reads one message
            column = "source" if kind is Kind.MERGE else "payload"
            first, last = calls.first[calls.of[task][0]], calls.last[calls.of[task][-1]]
            here = self.held.arena.data_ptr() + self.collective.program.offset[reads[0]]
            self.rows[column][first:last] += np.uint64((begin - here) % (1 << 64))
        if kind is Kind.DECODE:
            return None
        of_peers = self.collective.of_peers[task]
        distances = [self._address(buffer) - begin for buffer in of_peers]
        return np.array([*distances, *(calls.summed[task] if calls.summed else ())], dtype="i8")

    def _address(self, buffer: int) -> int:
        """The address at which kernels read a message."""
        if buffer in self.lent:
            return self.lent[buffer][1].data_ptr()
        return self.held.arena.data_ptr() + self.collective.program.offset[buffer]

    def received(self, task: int) -> None:
        buffers = self.collective.message[task]
        if len(buffers) > 1:
            headers = self.collective.headers(buffers, self._envelope)
            array = self.memory(*buffers).numpy()
            version = headers.least_version(array, self._envelope(buffers[0]))
            if version is not None:
                self.ticket.version = min(self.ticket.version, version)
                return
        for buffer in buffers:
            message = self.memory(buffer)
            check(message, self._envelope(buffer), self.graph.peer[task])
            self.ticket.version = min(self.ticket.version, version_of(message))

    def _envelope(self, buffer: int) -> Envelope:
        c, g = self.collective, self.graph
        place = g.buffer_segment[buffer], g.buffer_chunk[buffer]
        return Envelope(c.plan, self.sequence, *place, self.call, c.program.checksum)

    def finish(self) -> None:
        self.held.give()
        self.items = ()
        del self.held, self.rows, self.series  # a reference to the job must not keep its memory


def check_item(spec: Spec, item: Item, comm: Communicator, device: torch.device) -> None:
    """Raise ConfigError unless an item's memory matches its spec: kernels get bare addresses."""
    check_memory(spec.name, "values", item.values, spec.extent(comm.world_size), spec.dtype, device)
    if spec.feedback:
        check_memory(spec.name, "residual", item.residual, spec.numel, torch.float32, device)
    if item.home is not None:
        _, shard, _ = spec.shards(comm.world_size)[comm.rank]
        check_memory(spec.name, "shard", item.home, shard, spec.dtype, device)
    if not 0 <= item.step < 1 << 63:
        raise ConfigError(f"{spec.name}: step is {item.step}; it must be 0 or more")
