"""Compiling: from what a collective is, and where it runs, to what one rank does.

A pure function: nothing is communicated, loaded or kept, and no device is asked. All ranks compile
alike, but for their number and for what their transports can do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from gradwire import algorithms
from gradwire.algorithms import Algorithm, Coordinated, Hierarchical, Sizes
from gradwire.algorithms.broadcast import ScatterAllGather, Tree
from gradwire.algorithms.protocol import message
from gradwire.collectives.arena import borrowed, place
from gradwire.collectives.calls import Calls, kernel_calls
from gradwire.collectives.legal import check_way
from gradwire.collectives.operation import Operation
from gradwire.collectives.options import Options
from gradwire.collectives.packing import Packing, expected_sizes, packings
from gradwire.engine import HEADER_BYTES, Graph
from gradwire.engine.schedule import Wave, lower
from gradwire.engine.topology import Topology
from gradwire.errors import ConfigError
from gradwire.partition import SEGMENT_BYTES, Kind, Partition, Spec, partition

# Of a segment, in uncompressed values of a chunk. Over a network, encoding and sending overlap; in
# memory both are the work of the same cores, and what a segment costs is all there is to it.
IN_MEMORY_BYTES = 16 << 20


@dataclass(frozen=True)
class CollectiveLayout:
    """What travels, the same on every rank.

    Attributes:
        operation: what is done with the tensors.
        specs: the tensors. Of a reduce-scatter or all-gather, each holds every rank's shard, in
            rank order.
    """

    operation: Operation
    specs: tuple[Spec, ...]


@dataclass(frozen=True)
class Capabilities:
    """What a rank's transport can do.

    Attributes:
        fifo: whether messages between two ranks keep their order, and have no tags; the same on
            every rank.
        in_memory: whether no message of any rank leaves the memory of one machine; the same on
            every rank.
        staged: whether it cannot reach the memory of kernels.
        lenders: the ranks whose messages can be read where they lie.
    """

    fifo: bool = False
    in_memory: bool = False
    staged: bool = False
    lenders: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Program:
    """What one rank does in a collective, as columns.

    Attributes:
        graph: its tasks and buffers.
        sizes: payload bytes, sizes[segment][chunk].
        kinds: (codec, dtype) of each kernel that `calls` names.
        calls: of its kernels, with the rows of their table.
        nbytes: of each buffer: bytes of its message, header included, and where its length depends
            on data, those of the table.
        offset: where it begins in the arena; 0 if it is borrowed.
        borrowed: whether it is read where the peer that sends it has put it.
        readers: how many tasks read it.
        arena_bytes: of all messages; the kernels' workspace comes behind them.
        wire_bytes: what one run sends from this rank, by the algorithm's formula; where lengths
            depend on data, with those that codecs expect.
        packings: of each buffer, how its message is packed; None if its length is always the same.
        checksum: whether messages carry one.
        stages: the schedule of a transport that is `fifo`; else there is none.
    """

    graph: Graph
    sizes: tuple[tuple[int, ...], ...]
    kinds: tuple[Kind, ...]
    calls: Calls
    nbytes: Sequence[int]
    offset: Sequence[int]
    borrowed: Sequence[bool]
    readers: Sequence[int]
    arena_bytes: int
    wire_bytes: int
    packings: Sequence[Packing | None]
    checksum: bool
    stages: tuple[Wave, ...]


def compile(
    layout: CollectiveLayout, topology: Topology, capabilities: Capabilities, options: Options
) -> Program:
    """The program of one rank.

    Raises:
        ConfigError: an algorithm that the operation does not have, a tensor that cannot be cut into
            shards, a number of machines that is not that of ranks, or a checksum where no host sees
            messages.
    """
    if capabilities.fifo and options.checksum:
        raise ConfigError(
            "these tensors travel in stream order, where no host could compare a checksum: leave "
            "Options(checksum=None)"
        )
    rank, world_size = topology.rank, topology.world_size
    algorithm = algorithm_of(layout.operation, topology, options)
    # A GPU's messages are not the work of its kernels' cores, wherever they go.
    in_memory = capabilities.in_memory and not capabilities.fifo
    parts = cut(layout, algorithm, world_size, options, in_memory)
    graph = algorithm.build(rank, world_size, parts.sizes)
    packed = [None] * len(graph.buffer_role) if capabilities.fifo else packings(graph, parts)
    nbytes = [
        most if packing is None else most + packing.head_bytes - HEADER_BYTES
        for most, packing in zip(message_bytes(graph, parts.sizes), packed, strict=True)
    ]
    # Coordinated rounds count on sends that end as soon as the message has left; links and pinned
    # memory bring messages to a place of their own; triton's are at equal distances.
    copies = (
        capabilities.fifo
        or capabilities.staged
        or options.coordinated
        or options.target == "triton"
    )
    lent = borrowed(graph, nbytes, frozenset() if copies else capabilities.lenders)
    offsets, arena_bytes = place(graph, nbytes, lent)
    readers = [0] * len(nbytes)
    for reads in graph.reads:
        for buffer in reads:
            readers[buffer] += 1
    # Where no host looks at messages, they travel as large as they can be.
    sizes = parts.sizes if capabilities.fifo else expected_sizes(parts)
    hop = partial(algorithm.hop, world_size=world_size)
    return Program(
        graph=graph,
        sizes=parts.sizes,
        kinds=parts.kinds,
        calls=kernel_calls(graph, parts, layout.specs, offsets, rank, options.batched),
        nbytes=nbytes,
        offset=offsets,
        borrowed=lent,
        readers=readers,
        arena_bytes=arena_bytes,
        wire_bytes=algorithm.wire_bytes(rank, world_size, sizes),
        packings=packed,
        checksum=not in_memory if options.checksum is None else options.checksum,
        stages=lower(graph, rank, hop) if capabilities.fifo else (),
    )


def cut(
    layout: CollectiveLayout,
    algorithm: Algorithm,
    world_size: int,
    options: Options,
    in_memory: bool,
) -> Partition:
    """The tensors, cut for an algorithm; `in_memory` as of Capabilities."""
    return partition(
        layout.specs,
        chunks=options.partitions or algorithm.chunks(world_size),
        segments=options.segments,
        plain=isinstance(algorithm, Hierarchical) and algorithm.inside == "full",
        shards=layout.operation.shards,
        segment_bytes=IN_MEMORY_BYTES if in_memory else SEGMENT_BYTES,
    )


def message_bytes(graph: Graph, sizes: Sizes) -> list[int]:
    """Of the message of each buffer, header included."""
    places = zip(graph.buffer_segment, graph.buffer_chunk, strict=True)
    return [message(sizes[segment][chunk]) for segment, chunk in places]


def algorithm_of(operation: Operation, topology: Topology, options: Options) -> Algorithm:
    """What runs a collective.

    Raises:
        ConfigError: what `check_way` refuses, or a number of machines that is not that of ranks.
    """
    check_way(operation, options, topology.world_size, str(operation))
    algorithm = algorithms.OF[operation.verb][options.algorithm]
    if options.coordinated:
        return Coordinated(algorithm)
    if isinstance(algorithm, Hierarchical):
        nodes = topology.machines if options.nodes is None else options.nodes
        if len(nodes) != topology.world_size:
            raise ConfigError(f"nodes={nodes}: a machine for each of {topology.world_size} ranks")
        return replace(algorithm, nodes=nodes, inside=options.inside, between=options.between)
    if isinstance(algorithm, (ScatterAllGather, Tree)):
        return replace(algorithm, root=operation.root)
    return algorithm
