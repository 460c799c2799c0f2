"""Collectives on compressed tensors: choose an algorithm, build its graph, run it.

prepare    once per set of tensors: partition, graph, kernel calls, agreement between ranks start
each step: fill in addresses and RNG keys, hand the job to the executor all_reduce the same for
one tensor, in torch's manner
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from gradwire import algorithms, codecs
from gradwire.engine import HEADER_BYTES, Buffer, Communicator, Kind, Outcome, Task
from gradwire.engine.message import Envelope, align, check, seal
from gradwire.errors import ConfigError
from gradwire.groups import communicator
from gradwire.lang import ROW, Codec, kernels, rng
from gradwire.partition import Row, Spec, partition

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Item:
    """One tensor of one call.

    Attributes:
        values: 1-D, contiguous, on the CPU; replaced by the result.
        residual: fp32, as long as `values`, or None.
        key: from `rng.parameter_key`.
        step: enters the RNG key, so that no two steps draw the same numbers.
    """

    values: torch.Tensor
    key: int
    step: int
    residual: torch.Tensor | None = None


@dataclass(frozen=True)
class Options:
    """How a collective runs; the same on every rank, but for `target` and `threads`.

    Attributes:
        algorithm: a name of `gradwire.algorithms.REGISTRY`.
        segments: pipeline units a chunk; None chooses by size.
        checksum: whether messages carry one.
        target: which kernels ("auto", "c", "eager"); all make the same bytes.
        threads: of a kernel; None takes torch's number.

    Raises:
        ConfigError: an unknown algorithm or target, a number below one.
    """

    algorithm: str = "sra"
    segments: int | None = None
    checksum: bool = True
    target: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        algorithms.get(self.algorithm)
        if self.target not in ("auto", "c", "eager"):
            raise ConfigError(f"target {self.target!r}; known: auto, c, eager")
        for name, value in (("segments", self.segments), ("threads", self.threads)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: at least 1, or None to let gradwire choose")

    def __str__(self) -> str:
        return f"algorithm {self.algorithm}, segments {self.segments}, checksum {self.checksum}"


@dataclass(frozen=True)
class _Call:
    """One kernel call of a task: rows [first, last) of the job's table."""

    kernel: int
    form: str
    first: int
    last: int


@dataclass
class _Table:
    """The rows of all kernel calls, with what does not change from step to step."""

    rows: np.ndarray
    item: np.ndarray
    values: np.ndarray  # bytes from the start of the item's values
    residual: np.ndarray
    payload: np.ndarray  # bytes from the start of the arena
    source: np.ndarray
    merges: np.ndarray  # which rows encode a sum: they draw other random numbers
    calls: dict[Task, list[_Call]] = field(default_factory=dict)


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
        raw_bytes: bytes of the tensors.
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
        self.rows = cut.rows
        self.graph = algorithm.build(comm.rank, comm.world_size, cut.sizes)
        self.wire_bytes: int = algorithm.wire_bytes(comm.rank, comm.world_size, cut.sizes)
        self.raw_bytes = sum(spec.numel * spec.dtype.itemsize for spec in self.specs)
        self.plan = comm.agree("a collective", [str(options), *map(str, self.specs)])
        self.sizes = cut.sizes
        self._roles: tuple[str, ...] = algorithm.ROLES
        self._kinds = list(dict.fromkeys((s.codec, s.dtype) for s in self.specs))
        self.kernels = [kernels(codec, dtype, options.target) for codec, dtype in self._kinds]

    @cached_property
    def offsets(self) -> dict[Buffer, int]:
        """Where each message starts in the arena.

        Sorted, so that what a merge sums stands in rank order.
        """
        offsets, position = {}, 0
        for buffer in sorted(self.graph.buffers):
            offsets[buffer] = position
            position += align(self.message_bytes(buffer))
        return offsets

    @cached_property
    def arena_bytes(self) -> int:
        """Memory that a run owns: its messages and the kernels' workspace."""
        return self._workspace_offset + self._workspace_bytes

    @cached_property
    def _workspace_offset(self) -> int:
        return align(
            max((self.offsets[b] + self.message_bytes(b) for b in self.offsets), default=0)
        )

    @cached_property
    def _workspace_bytes(self) -> int:
        table, needed = self._table, 0
        for calls in table.calls.values():
            for call in calls:
                numels = table.rows["numel"][call.first : call.last]
                needed = max(needed, self.kernels[call.kernel].layout.workspace_nbytes(numels))
        return align(needed)

    def message_bytes(self, buffer: Buffer) -> int:
        return self.sizes[buffer.segment][buffer.chunk] + HEADER_BYTES

    @property
    def tags(self) -> int:
        return len(self._roles) * len(self.sizes) * self.comm.world_size**2

    def tag(self, buffer: Buffer) -> int:
        """A number for `buffer` that both ends compute alike."""
        n = self.comm.world_size
        place = self._roles.index(buffer.role) * len(self.sizes) + buffer.segment
        return (place * n + buffer.chunk) * n + buffer.source

    @cached_property
    def _table(self) -> _Table:
        """Sort rows into kernel calls: a task's rows stand together, by kernel."""
        by_message: dict[tuple[int, int], list[Row]] = {}
        for row in self.rows:
            by_message.setdefault((row.segment, row.chunk), []).append(row)
        chosen: list[tuple[Row, Buffer, Buffer | None]] = []  # row, its payload, its first source
        calls: dict[Task, list[_Call]] = {}
        for task in self.graph.tasks:
            if task.kind in (Kind.SEND, Kind.RECV):
                continue
            payloads = task.reads if task.kind is Kind.DECODE else task.writes
            source = task.reads[0] if task.kind is Kind.MERGE else None
            found = [(row, b) for b in payloads for row in by_message[b.segment, b.chunk]]
            found.sort(key=lambda pair: self._kernel_of(pair[0]))
            calls[task] = []
            for row, buffer in found:
                kernel, feedback = self._kernel_of(row)
                form = _form(task.kind, feedback)
                at = len(chosen)
                last = calls[task][-1] if calls[task] else None
                if last is not None and (last.kernel, last.form) == (kernel, form):
                    calls[task][-1] = _Call(kernel, form, last.first, at + 1)
                else:
                    calls[task].append(_Call(kernel, form, at, at + 1))
                chosen.append((row, buffer, source))

        def column(values: list[int], dtype: str = "u8") -> np.ndarray:
            return np.array(values, dtype=dtype)

        rows = np.zeros(len(chosen), dtype=ROW)
        rows["numel"] = [row.numel for row, _, _ in chosen]
        rows["start"] = [row.start for row, _, _ in chosen]
        inside = [HEADER_BYTES + row.offset for row, _, _ in chosen]
        where = self.offsets
        return _Table(
            rows=rows,
            item=column([row.item for row, _, _ in chosen], "i8"),
            values=column([r.start * self.specs[r.item].dtype.itemsize for r, _, _ in chosen]),
            residual=column([r.start * 4 for r, _, _ in chosen]),
            payload=column([where[b] + i for (_, b, _), i in zip(chosen, inside, strict=True)]),
            source=column(
                [(where[s] if s else 0) + i for (_, _, s), i in zip(chosen, inside, strict=True)]
            ),
            merges=np.array([s is not None for _, _, s in chosen], dtype=bool),
            calls=calls,
        )

    def _kernel_of(self, row: Row) -> tuple[int, bool]:
        spec = self.specs[row.item]
        return self._kinds.index((spec.codec, spec.dtype)), spec.feedback

    def start(self, items: Sequence[Item], average: bool) -> Future[Outcome]:
        """Run it on `items` (one for each spec, in order); the values are replaced by the result.

        Args:
            items: this step's tensors.
            average: divide the sum by the world size.

        Returns:
            A future that ends when the result is in place, or with the error that prevented it.
        """
        for spec, item in zip(self.specs, items, strict=True):
            values = item.values
            assert values.is_contiguous()
            assert (values.numel(), values.dtype) == (spec.numel, spec.dtype), spec.name
            assert spec.feedback == (item.residual is not None), spec.name
        return self.comm.executor.submit(_Job(self, items, average))


def prepare(comm: Communicator, specs: Sequence[Spec], options: Options | None = None) -> AllReduce:
    """The AllReduce of `specs`, built on first use and kept while it is among the 64 used last.

    Raises:
        ConfigError: as AllReduce.
    """
    key = (tuple(specs), options)
    cache = _prepared.setdefault(comm, OrderedDict())
    if key not in cache:
        cache[key] = AllReduce(comm, specs, options)
        if len(cache) > _KEPT:
            cache.popitem(last=False)
    cache.move_to_end(key)
    return cache[key]


_KEPT = 64
_Cache = OrderedDict[tuple[tuple[Spec, ...], Options | None], AllReduce]
_prepared: weakref.WeakKeyDictionary[Communicator, _Cache] = weakref.WeakKeyDictionary()


class _Job:
    """One run of an AllReduce: what the executor asks for (gradwire.engine.Job)."""

    def __init__(self, collective: AllReduce, items: Sequence[Item], average: bool) -> None:
        self.collective = collective
        self.graph = collective.graph
        self.items = items  # kept alive until the kernels are done with their memory
        self.factor = 1.0 / collective.comm.world_size if average else 1.0
        self.sequence, self.first_tag = collective.comm.sequence(collective.plan, collective.tags)
        self.threads = collective.options.threads or torch.get_num_threads()

    def start(self) -> None:
        c = self.collective
        table = c._table
        self.arena = c.comm.take(c.arena_bytes)
        base = np.uint64(self.arena.data_ptr())

        def pointers(tensors: list[torch.Tensor | None]) -> np.ndarray:
            return np.array([0 if t is None else t.data_ptr() for t in tensors], dtype="u8")

        values = pointers([item.values for item in self.items])
        residuals = pointers([item.residual for item in self.items])
        keys = np.array([item.key for item in self.items], dtype="u8")
        steps = np.array([item.step for item in self.items], dtype="u8")
        contribution, merged = (rng.step_keys(keys, steps, phase) for phase in (0, 1))
        rows = self.rows = table.rows.copy()
        rows["values"] = values[table.item] + table.values
        rows["residual"] = np.where(
            residuals[table.item] > 0, residuals[table.item] + table.residual, 0
        )
        rows["payload"] = base + table.payload
        rows["source"] = base + table.source
        rows["key"] = np.where(table.merges, merged[table.item], contribution[table.item])

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
        for call in c._table.calls[task]:
            c.kernels[call.kernel].run(
                call.form,
                self.rows[call.first : call.last],
                ranks=comm.world_size if merge else 1,
                rank=comm.rank if merge else 0,
                stride=stride,
                factor=self.factor if merge else 1.0,
                threads=self.threads,
                workspace=self.arena[c._workspace_offset :],
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


def _form(kind: Kind, feedback: bool) -> str:
    if kind is Kind.DECODE:
        return "decode"
    return {Kind.ENCODE: "encode", Kind.MERGE: "reduce_encode"}[kind] + ("_ef" if feedback else "")


def _stride(offsets: list[int]) -> int:
    strides = {b - a for a, b in pairwise(offsets)}
    assert len(strides) <= 1, "the payloads that a merge sums stand at equal distances"
    return strides.pop() if strides else 0


def all_reduce(
    tensor: torch.Tensor,
    codec: str | Codec = "qsgd",
    *,
    op: str = "sum",
    group: dist.ProcessGroup | Communicator | None = None,
    async_op: bool = False,
    residual: torch.Tensor | None = None,
    seed: int = 0,
    step: int = 0,
    name: str = "tensor",
    options: Options | None = None,
    **codec_options: object,
) -> torch.futures.Future[torch.Tensor] | None:
    """Sum or average `tensor` over all ranks through a codec, in place (CGX 4.1).

    Every rank ends with bit-identical values. With one rank nothing is sent and nothing changes.

    Args:
        tensor: fp32, fp16 or bf16 on the CPU, any shape and layout.
        codec: a name (see `gradwire codec list`) with its options as keywords, or a Codec.
        op: "sum" or "avg".
        group: a process group; None is the default one.
        async_op: return a future at once; its `wait()` gives the tensor.
        residual: error feedback: fp32, `tensor.numel()` values, zeros at first; it is added before
            encoding, and holds what was not sent afterwards.
        seed, step, name: what the codec's random numbers derive from, with the rank. Give every
            call its own step if the codec rounds at random.
        options: algorithm, segments, checksum.

    Raises:
        ConfigError: unknown codec, op or dtype; ranks that disagree.
        TransportError: a peer or link failed.
        CodecError: a payload arrived corrupted.
    """
    if op not in ("sum", "avg"):
        raise ConfigError(f"op {op!r}: gradwire.all_reduce knows 'sum' and 'avg'")
    if tensor.device.type != "cpu":
        raise ConfigError(f"tensor is on {tensor.device}: this version compresses CPU tensors")
    chosen = codecs.get(codec, **codec_options)
    comm = group if isinstance(group, Communicator) else communicator(group)
    spec = Spec(name, tensor.numel(), tensor.dtype, chosen, residual is not None)
    collective = prepare(comm, [spec], options)
    values = tensor.detach().contiguous().view(-1)
    if residual is not None and (
        residual.numel() != values.numel() or residual.dtype != torch.float32
    ):
        raise ConfigError(
            f"residual: {residual.numel()} x {residual.dtype}; "
            f"it must hold {values.numel()} x float32"
        )
    flat_residual = None if residual is None else residual.view(-1)
    key = rng.parameter_key(seed, name, comm.rank)
    running = collective.start([Item(values, key, step, flat_residual)], average=op == "avg")

    def finish(outcome: Future[Outcome]) -> torch.Tensor:
        outcome.result()
        if values.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(values.view(tensor.shape))
        return tensor

    if not async_op:
        finish(running)
        return None
    result: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def deliver(outcome: Future[Outcome]) -> None:
        error = outcome.exception()
        if error is None:
            result.set_result(finish(outcome))
        else:
            result.set_exception(error)  # type: ignore[arg-type]

    running.add_done_callback(deliver)
    return result
