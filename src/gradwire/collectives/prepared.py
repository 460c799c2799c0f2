"""A collective on a fixed set of tensors: prepared once, run every step.

prepare    agreement between ranks, the program, kernels
start      fill in addresses and RNG keys, hand the job to the executor
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from gradwire.collectives.compile import Capabilities, CollectiveLayout, compile
from gradwire.collectives.defined import check_defined, check_feedback
from gradwire.collectives.job import Item, Job, check_item
from gradwire.collectives.memory import is_staged
from gradwire.collectives.options import Options
from gradwire.collectives.ordered_job import OrderedJob
from gradwire.collectives.topology import Topology, machines
from gradwire.engine import Communicator, Outcome
from gradwire.errors import ConfigError
from gradwire.lang import Codec, fingerprint, kernels
from gradwire.lang.kernels import Kernels
from gradwire.partition import Spec

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_KEPT = 1024  # more than the buckets of any model, few enough to hold


class Collective:
    """A collective on a fixed set of tensors, prepared once and run every step.

    Args:
        comm: the process group's engine.
        specs: the tensors, the same on every rank.
        options: how to run it.
        kind: "all_reduce", or one of its halves: "reduce_scatter", "all_gather". Of a half, each
            tensor holds every rank's shard, in rank order.
        device: of the tensors: the CPU, or a GPU, from which messages go over NCCL, or by way of
            pinned memory where the group has none.

    Raises:
        ConfigError: ranks disagree on the specs or options, a dtype is not a supported float, a
            tensor cannot be cut into shards, a codec is not defined in the algorithm or with error
            feedback, or has no kernels for the device, or a checksum is asked for over NCCL.
        TransportError: a peer did not answer.

    Attributes:
        wire_bytes: what one run sends from this rank, in bytes, by the algorithm's formula.
        arena_bytes: memory that one run owns: its messages, and the kernels' workspace.
        borrowed: bytes of the messages that are read where the peer that sends them has put them.
    """

    def __init__(
        self,
        comm: Communicator,
        specs: Sequence[Spec],
        options: Options | None = None,
        kind: str = "all_reduce",
        device: torch.device = CPU,
    ) -> None:
        options = options or Options()
        self.comm = comm
        self.device = device
        self.specs = tuple(specs)
        self.options = options
        for spec in self.specs:
            if spec.dtype not in DTYPES:
                raise ConfigError(
                    f"{spec.name}: cannot compress {spec.dtype}; float32, float16 and bfloat16 "
                    f"can be. Use torch.distributed.{kind} for other dtypes"
                )
            if kind == "all_reduce":
                check_defined(options.algorithm, spec.codec)
            if spec.feedback:
                check_feedback(spec.codec)
        # Before anything else is exchanged: what follows is the same on every rank.
        # Once: `options` may differ between ranks, and change on one, in what its text leaves out.
        used = dict.fromkeys((spec.codec, spec.dtype) for spec in self.specs)
        agreed = [kind, f"on {device.type}", str(options), *map(str, self.specs)]
        # A codec's name says little of a user's file, which may be an older one elsewhere.
        agreed += [f"{codec}: program {fingerprint(codec, dtype)}" for codec, dtype in used]
        self.plan = comm.agree("a collective", agreed, once=True)
        in_order = comm.in_order(device)
        capabilities = Capabilities(
            fifo=in_order is not None,
            in_memory=in_order is None and comm.in_memory(),
            staged=is_staged(device),
            lenders=frozenset() if in_order is not None else comm.transport.lenders,
        )
        asks = options.algorithm == "hierarchical" and options.nodes is None
        topology = Topology(comm.rank, comm.world_size, machines(comm) if asks else ())
        layout = CollectiveLayout(kind, self.specs)
        self.program = program = compile(layout, topology, capabilities, options)
        self.graph = program.graph
        self.wire_bytes = program.wire_bytes
        self.borrowed = {b: program.nbytes[b] for b, lent in enumerate(program.borrowed) if lent}
        self._in_order = in_order
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
                    calls.numel[calls.first[call] : calls.last[call]], self.threads, len(reads) + 1
                )
                for reads, of_task in zip(self.graph.reads, calls.of, strict=True)
                for call in of_task
            ),
            default=0,
        )

    @property
    def tags(self) -> int:
        """How many tags a run needs."""
        return len(self.graph.roles) * sum(map(len, self.program.sizes))

    def tag(self, buffer: int) -> int:
        """A number for `buffer` that both ends compute alike; unique between two given ranks."""
        g, sizes = self.graph, self.program.sizes
        role, segment = g.roles.index(g.buffer_role[buffer]), g.buffer_segment[buffer]
        return (role * len(sizes) + segment) * len(sizes[0]) + g.buffer_chunk[buffer]

    def start(self, items: Sequence[Item], average: bool) -> Future[Outcome]:
        """Run it on `items` (one for each spec, in order); the values are replaced by the result.

        Args:
            items: this step's tensors.
            average: divide the sum by the world size.

        Returns:
            A future that ends when the result is in place, or with the error that prevented it;
            over NCCL, when it is queued: `result()` has the caller's stream wait for it.

        Raises:
            ConfigError: memory that is not what the spec says; nothing has been sent then.
            TransportError: the group is broken.
            CodecError: likewise, by a payload on a GPU.
        """
        for spec, item in zip(self.specs, items, strict=True):
            check_item(spec, item, self.comm.world_size, self.device)
        if self._in_order is not None:
            return self._in_order.submit(OrderedJob(self, items, average))
        return self.comm.executor.submit(Job(self, items, average))


def prepare(
    comm: Communicator,
    specs: Sequence[Spec],
    options: Options | None = None,
    kind: str = "all_reduce",
    device: torch.device = CPU,
) -> Collective:
    """The Collective of `specs`, built on first use and kept while it is among those used last.

    Raises:
        ConfigError: as Collective, or `options` of another type.
    """
    if not (options is None or isinstance(options, Options)):
        raise ConfigError(f"options={options!r}: give a gradwire.Options(...), or None")
    key = (kind, tuple(specs), options or Options(), device)
    kept = comm.kept
    with comm.preparing:
        if key not in kept:
            kept[key] = Collective(comm, specs, options, kind, device)
            if len(kept) > _KEPT:
                kept.popitem(last=False)
        kept.move_to_end(key)
        prepared = kept[key]
    assert isinstance(prepared, Collective)
    return prepared


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
