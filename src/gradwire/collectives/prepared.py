"""A collective on a fixed set of tensors: prepared once, run every step.

prepare    agreement between ranks, partition, graph, kernel calls
start      fill in addresses and RNG keys, hand the job to the executor
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch

from gradwire import algorithms
from gradwire.algorithms import Algorithm, Coordinated, Hierarchical
from gradwire.collectives.arena import borrowed, place
from gradwire.collectives.calls import Calls
from gradwire.collectives.defined import check_defined, check_feedback
from gradwire.collectives.job import Item, Job, check_item
from gradwire.collectives.memory import is_staged
from gradwire.collectives.options import Options
from gradwire.collectives.ordered_job import OrderedJob
from gradwire.collectives.topology import machines
from gradwire.engine import HEADER_BYTES, Communicator, Outcome
from gradwire.engine.schedule import Stage, lower
from gradwire.errors import ConfigError
from gradwire.lang import Codec, fingerprint, kernels
from gradwire.lang.kernels import Kernels
from gradwire.partition import SEGMENT_BYTES, Spec, partition

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of a segment, in uncompressed values of a chunk. Over a network, encoding and sending overlap; in
# memory both are the work of the same cores, and what a segment costs is all there is to it.
IN_MEMORY_BYTES = 16 << 20
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
        readers: how many tasks read each of these.
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
        algorithm = _algorithm(comm, options, kind)
        plain = isinstance(algorithm, Hierarchical) and algorithm.inside == "full"
        chunks = options.partitions or algorithm.chunks(comm.world_size)
        shards = kind != "all_reduce"
        self._in_order = comm.in_order(device)
        if self._in_order is not None and options.checksum:
            raise ConfigError(
                f"tensors on {device} travel in stream order, where no host could compare a "
                "checksum: leave Options(checksum=None)"
            )
        # A GPU's messages are not the work of its kernels' cores, wherever they go.
        in_memory = self._in_order is None and comm.in_memory()
        self.checksum = not in_memory if options.checksum is None else options.checksum
        segment_bytes = IN_MEMORY_BYTES if in_memory else SEGMENT_BYTES
        cut = partition(self.specs, chunks, options.segments, plain, shards, segment_bytes)
        self.graph = algorithm.build(comm.rank, comm.world_size, cut.sizes)
        self.wire_bytes = algorithm.wire_bytes(comm.rank, comm.world_size, cut.sizes)
        self.sizes = cut.sizes
        self._roles = algorithm.ROLES
        kinds = list(dict.fromkeys((row.codec, self.specs[row.item].dtype) for row in cut.rows))
        self.schedule: tuple[Stage, ...] = ()
        if self._in_order is not None:
            hop = partial(algorithm.hop, world_size=comm.world_size)
            self.schedule = lower(self.graph, comm.rank, hop)

        # Coordinated rounds count on sends that end as soon as the message has left; links and
        # pinned memory bring messages to a place of their own; triton's are at equal distances.
        copies = (
            self._in_order is not None
            or is_staged(device)
            or options.coordinated
            or options.target == "triton"
        )
        lenders = frozenset[int]() if copies else comm.transport.lenders
        self.borrowed = borrowed(self.graph, self.message_bytes, lenders)
        self.readers = Counter(b for reads in self.graph.reads for b in reads if b in self.borrowed)
        self.offsets, self.workspace_offset = place(
            self.graph, self.message_bytes, elsewhere=self.borrowed
        )
        index = {kind: i for i, kind in enumerate(kinds)}
        self.calls = Calls(
            self.graph, cut.rows, self.specs, index, self.offsets, comm.rank, options.batched
        )
        self.kernels = [
            _kernels(codec, dtype, options.target, device, forms)
            for (codec, dtype), forms in zip(kinds, self.calls.forms(len(kinds)), strict=True)
        ]
        # of this communicator's own: others may run the same kernels on payloads that are bad
        self.marks = [made.mark(device) for made in self.kernels]
        self.threads = options.threads or torch.get_num_threads()
        self.arena_bytes = self.workspace_offset + max(
            (
                self.kernels[call.kernel].workspace_nbytes(
                    self.calls.numel[call.first : call.last],
                    self.threads,
                    len(self.graph.reads[task]) + 1,
                )
                for task, calls in self.calls.of.items()
                for call in calls
            ),
            default=0,
        )

    def message_bytes(self, buffer: int) -> int:
        """With its header."""
        g = self.graph
        return self.sizes[g.buffer_segment[buffer]][g.buffer_chunk[buffer]] + HEADER_BYTES

    @property
    def tags(self) -> int:
        """How many tags a run needs."""
        return len(self._roles) * sum(map(len, self.sizes))

    def tag(self, buffer: int) -> int:
        """A number for `buffer` that both ends compute alike; unique between two given ranks."""
        g = self.graph
        role, segment = self._roles.index(g.buffer_role[buffer]), g.buffer_segment[buffer]
        return (role * len(self.sizes) + segment) * len(self.sizes[0]) + g.buffer_chunk[buffer]

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


def _algorithm(comm: Communicator, options: Options, kind: str) -> Algorithm:
    """What runs a collective of `kind`, on the machines that there are."""
    if kind != "all_reduce":
        if options.algorithm != "sra":
            raise ConfigError(
                f"{kind} is a half of the algorithm sra; it has no algorithm {options.algorithm!r}"
            )
        algorithm = algorithms.HALVES[kind]
    else:
        algorithm = algorithms.get(options.algorithm)
    if options.coordinated:
        return Coordinated(algorithm)
    if isinstance(algorithm, Hierarchical):
        nodes = machines(comm) if options.nodes is None else options.nodes
        if len(nodes) != comm.world_size:
            raise ConfigError(f"nodes={nodes}: a machine for each of {comm.world_size} ranks")
        return replace(algorithm, nodes=nodes, inside=options.inside)
    return algorithm
