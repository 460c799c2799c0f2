"""What a collective needs before its first step: its program, with kernels that run it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.collectives.compile import Capabilities, CollectiveLayout, compile
from gradwire.collectives.memory import is_staged
from gradwire.collectives.options import Options
from gradwire.engine import Communicator
from gradwire.errors import ConfigError
from gradwire.lang import Codec, kernels
from gradwire.lang.kernels import Kernels
from gradwire.partition import Spec

CPU = torch.device("cpu")


class Prepared:
    """A layout on this rank, ready to run.

    Args:
        comm: of the process group.
        specs, options, kind, device: as of `Collective`.
        plan: digest of what ranks compare; message headers carry it.

    Raises:
        ConfigError: what `compile` refuses, or a codec has no kernels for the device.
        TransportError: a peer did not answer when the group opened.

    Attributes:
        program: what this rank does.
        wire_bytes: what one run sends from this rank, in bytes, by the algorithm's formula.
        arena_bytes: memory that one run owns: its messages, and the kernels' workspace.
        borrowed: bytes of the messages that are read where the peer that sends them has put them.
        tags: see `Ticket.tag`.
    """

    tags = 0

    def __init__(
        self,
        comm: Communicator,
        specs: tuple[Spec, ...],
        options: Options,
        kind: str,
        device: torch.device,
        plan: int,
    ) -> None:
        self.comm = comm
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
        layout = CollectiveLayout(kind, specs)
        self.program = program = compile(layout, comm.topology, capabilities, options)
        self.graph = program.graph
        self.wire_bytes = program.wire_bytes
        self.borrowed = {b: program.nbytes[b] for b, lent in enumerate(program.borrowed) if lent}
        forms = program.calls.forms(len(program.kinds))
        self.kernels = [
            _kernels(codec, dtype, options.target, device, wanted)
            for (codec, dtype), wanted in zip(program.kinds, forms, strict=True)
        ]
        # of this communicator's own: others may run the same kernels on payloads that are bad
        self.marks = [made.mark(device) for made in self.kernels]
        self.threads = options.threads or torch.get_num_threads()
        calls = program.calls
        self.arena_bytes = program.arena_bytes + max(
            (
                self.kernels[calls.kernel[call]].workspace_nbytes(
                    calls.rows["numel"][calls.first[call] : calls.last[call]],
                    self.threads,
                    len(reads) + 1,
                )
                for reads, of_task in zip(self.graph.reads, calls.of, strict=True)
                for call in of_task
            ),
            default=0,
        )


def _kernels(
    codec: Codec, dtype: torch.dtype, target: str, device: torch.device, forms: Sequence[str]
) -> Kernels:
    """What runs these forms on tensors of `device`, where the user has said `target`."""
    if device.type != "cpu":
        if target not in ("auto", "triton"):
            raise ConfigError(f"target {target!r} cannot read tensors on {device}: use 'auto'")
        target = "triton"
    made = kernels(codec, dtype, target, forms)
    if made.device.type != device.type:
        raise ConfigError(
            f"{codec} has no kernels for tensors on {device}: its matrices are computed on the "
            "CPU. Use another codec there"
        )
    return made
