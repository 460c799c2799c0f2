"""A prepared collective: its program, and the kernels that run it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch

from gradwire.collectives.compile import Capabilities, compile
from gradwire.collectives.memory import is_staged
from gradwire.collectives.operation import Operation
from gradwire.collectives.options import Options
from gradwire.engine import Communicator, Kind
from gradwire.engine.message import Envelope, Headers
from gradwire.errors import ConfigError
from gradwire.lang import Codec, KernelCall, Kernels, Series, kernels, layout
from gradwire.partition import Spec

log = logging.getLogger("gradwire")

CPU = torch.device("cpu")
_MILLION = 10**6
_announced: set[Codec] = set()


class Prepared:
    """A layout on this rank, ready to run.

    Args:
        comm: of the process group.
        operation, specs, options, device: as for `Collective`.
        plan: digest of what ranks compare; message headers carry it.

    Raises:
        ConfigError: `compile` rejects it, or a codec has no kernels for the device.
        TransportError: a peer did not answer when the group opened.

    Attributes:
        program: this rank's program.
        wire_bytes: bytes that this rank sends per run, see `Program`.
        arena_bytes: memory of one run: its messages, and the kernels' workspace.
        borrowed: first buffer -> bytes, for messages that are read in the sender's memory.
        together: per task, the buffers that it writes, grouped by message.
        tags: see `Ticket.tag`.
    """

    tags = 0

    def __init__(
        self,
        comm: Communicator,
        operation: Operation,
        specs: tuple[Spec, ...],
        options: Options,
        device: torch.device,
        plan: int,
    ) -> None:
        self.comm = comm
        self.operation = operation
        self.device = device
        self.specs = specs
        self.plan = plan
        fifo = comm.stream(device) is not None
        capabilities = Capabilities(
            fifo=fifo,
            in_memory=not fifo and comm.topology.in_memory,
            staged=is_staged(device),
            lenders=frozenset() if fifo else comm.transport.lenders,
        )
        self.program = program = compile(operation, specs, comm.topology, capabilities, options)
        self.graph = program.graph
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
        self.together = [self.graph.together(task) for task in range(len(self.graph))]
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
        pool = self.comm.pools.of(self.device)
        arena = pool.take(self.arena_bytes)
        arena.zero_()  # touches its pages
        pool.give(arena)


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
