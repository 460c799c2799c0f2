"""A collective of a scope, and what is prepared of it: its program, and the kernels that run it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from gradwire.collectives.compile import Capabilities, compile
from gradwire.collectives.memory import is_staged
from gradwire.collectives.operation import Operation
from gradwire.collectives.options import Options
from gradwire.engine import Communicator, Kind
from gradwire.engine.message import Envelope, Headers
from gradwire.errors import ConfigError
from gradwire.lang import Codec, KernelCall, Kernels, Series, fingerprint, kernels, layout
from gradwire.partition import Spec

log = logging.getLogger("gradwire")

CPU = torch.device("cpu")
_MILLION = 10**6
_announced: set[Codec] = set()


@dataclass(frozen=True)
class Part:
    """One collective of a round.

    Attributes:
        operation: verb, operator and root.
        specs: the tensors, the same on every rank.
        options: how to run it.
        device: of the tensors: the CPU, or a GPU, whose messages travel over NCCL, or through
            pinned memory where the group has no NCCL.
    """

    operation: Operation
    specs: tuple[Spec, ...]
    options: Options
    device: torch.device

    def lines(self) -> list[str]:
        """Its description, equal on all ranks."""
        used = dict.fromkeys((spec.codec, spec.dtype) for spec in self.specs)
        # A codec's name does not identify its code: a rank may have an older version of the file.
        programs = [f"{codec}: program {fingerprint(codec, dtype)}" for codec, dtype in used]
        what = [str(self.operation), f"on {self.device.type}", str(self.options)]
        return [*what, *map(str, self.specs), *programs]

    def __str__(self) -> str:
        values = sum(spec.numel for spec in self.specs)
        codecs = ", ".join(dict.fromkeys(str(spec.codec) for spec in self.specs))
        dtypes = dict.fromkeys(str(spec.dtype).removeprefix("torch.") for spec in self.specs)
        alone = len(self.specs) == 1
        what = f"{self.specs[0].name} of" if alone else f"{len(self.specs)} tensors of"
        return f"{self.operation} ({what} {values} x {', '.join(dtypes)} through {codecs})"

    def tells_all(self, ranks: int) -> bool:
        """Whether its messages carry data from every rank to every other: all but broadcasts do,
        and reduce-scatters of which a rank gets nothing."""
        if self.operation.verb == "reduce_scatter":
            shards = [[length for _, length, _ in spec.shards(ranks)] for spec in self.specs]
            return all(map(any, zip(*shards, strict=True)))
        return self.operation.verb != "broadcast" and any(spec.numel for spec in self.specs)


class Prepared:
    """A layout on this rank, ready to run.

    Args:
        comm: of the process group.
        part: what it runs.
        plan: digest of what ranks compare; message headers carry it.

    Raises:
        ConfigError: `compile` rejects it, or a codec has no kernels for the device.
        TransportError: a peer did not answer when the group opened.

    Attributes:
        program: this rank's program.
        wire_bytes: bytes that this rank sends per run, see `Program`.
        pool: of the arenas of its runs.
        arena_bytes: memory of one run: its messages, and the kernels' workspace.
        borrowed: first buffer -> bytes, for messages that are read in the sender's memory.
        together: per task, the buffers that it writes, grouped by message.
        message: per task, the buffers of its message.
        of_peers: per task, what it reads of each peer, the first buffer.
        tags, slot: see `Ticket.tag`; slots by task.
    """

    tags = 0

    def __init__(self, comm: Communicator, part: Part, plan: int) -> None:
        self.comm = comm
        self.plan = plan
        self.operation, self.specs = part.operation, part.specs
        options, device = part.options, part.device
        self.device = device
        fifo = comm.stream(device) is not None
        capabilities = Capabilities(
            fifo=fifo,
            in_memory=not fifo and comm.topology.in_memory,
            staged=is_staged(device),
            lenders=frozenset() if fifo else comm.transport.lenders,
        )
        self.program = program = compile(
            part.operation, part.specs, comm.topology, capabilities, options
        )
        self.graph = program.graph
        self.slot = list(self.graph.slot)
        self.wire_bytes = program.wire_bytes
        received = [
            writes
            for writes, peer in zip(self.graph.writes, self.graph.peer, strict=True)
            if peer >= 0
        ]
        self.borrowed = {
            message[0]: sum(program.nbytes[b] for b in message)
            for message in received
            if message and program.borrowed[message[0]]
        }
        if fifo:
            announce(codec for codec, _ in program.kinds)
        self._headers: dict[tuple[int, ...], Headers] = {}
        tasks = range(len(self.graph))
        self.together = [self.graph.together(task) for task in tasks]
        self.message = [self.graph.message(task) for task in tasks]
        self.of_peers = [self.graph.reads[t][:: max(self.graph.width(t), 1)] for t in tasks]
        forms = program.calls.forms(len(program.kinds))
        self.kernels = [
            _kernels(codec, dtype, options.target, device, wanted)
            for (codec, dtype), wanted in zip(program.kinds, forms, strict=True)
        ]
        # separate per communicator: others may run the same kernels on bad payloads
        self.marks = [made.mark(device) for made in self.kernels]
        self.threads = options.threads or torch.get_num_threads()
        numels = program.calls.rows["numel"]
        self.series = Series(self._calls(), numels, self.threads, together=options.batched)
        self.arena_bytes = program.arena_bytes + self.series.workspace_nbytes
        self.pool = comm.pools.of(device)

    def _calls(self) -> list[KernelCall]:
        """The program's calls, in order."""
        graph, calls = self.graph, self.program.calls
        made = []
        for task, of_task in enumerate(calls.of):
            merge, own = graph.kind[task] is Kind.MERGE, graph.own[task]
            payloads = len(graph.reads[task]) // max(graph.width(task), 1)
            made += [
                KernelCall(
                    self.kernels[calls.kernel[call]],
                    calls.form[call],
                    calls.first[call],
                    calls.last[call],
                    ranks=payloads + (own >= 0) if merge else 1,
                    rank=own if merge else 0,
                    scaled=graph.final[task],
                    mark=self.marks[calls.kernel[call]],
                )
                for call in of_task
            ]
        return made

    def headers(self, buffers: tuple[int, ...], envelope: Callable[[int], Envelope]) -> Headers:
        """The headers of a message."""
        if buffers not in self._headers:
            nbytes = [self.program.nbytes[buffer] for buffer in buffers]
            self._headers[buffers] = Headers(nbytes, list(map(envelope, buffers)))
        return self._headers[buffers]

    def reserve(self) -> None:
        """Allocate the memory of one run in advance."""
        arena = self.pool.take(self.arena_bytes)
        arena.zero_()  # touches its pages
        self.pool.give(arena)


def announce(codecs: Iterable[Codec]) -> None:
    """Warn, once per process and codec, that payloads travel at their greatest size, although fewer
    bytes are in use."""
    for codec in codecs:
        lay = layout(codec)
        if lay.data_dependent and codec not in _announced:
            _announced.add(codec)
            sizes = lay.nbytes(_MILLION), lay.expected_nbytes(_MILLION)
            log.warning(
                "%s: in stream order a payload is sent at its greatest size, %d bytes per million "
                "values; its codec expects %d of them to be in use",
                codec,
                *sizes,
            )


def _kernels(
    codec: Codec, dtype: torch.dtype, target: str, device: torch.device, forms: Sequence[str]
) -> Kernels:
    """The kernels for these forms on tensors of `device`, for the user's `target`."""
    if device.type != "cpu":
        if target not in ("auto", "triton"):
            raise ConfigError(f"target {target!r} cannot read tensors on {device}: use 'auto'")
        target = "triton"
    made = kernels(codec, dtype, target, forms)
    if made.device.type != device.type:
        raise ConfigError(
            f"{codec} has no kernels for tensors on {device}: its matrices are computed on the "
            "CPU. Use another codec"
        )
    return made
