"""Compiling: from a collective's layout and environment to one rank's program.

A pure function: it communicates, loads and caches nothing, and queries no device. Programs differ
between ranks only by rank and by the capabilities of their transports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gradwire import algorithms
from gradwire.algorithms import (
    Algorithm,
    Coordinated,
    Hierarchical,
    HierarchicalAllGather,
    HierarchicalReduceScatter,
    Sizes,
)
from gradwire.algorithms.broadcast import ScatterAllGather, Tree
from gradwire.algorithms.protocol import message
from gradwire.collectives.calls import Calls, kernel_calls
from gradwire.collectives.legal import check_algorithm
from gradwire.collectives.operation import Operation
from gradwire.collectives.options import Options
from gradwire.collectives.packing import Packing, expected, packings
from gradwire.collectives.placement import borrowed, place
from gradwire.engine import Graph
from gradwire.engine.schedule import Wave, lower
from gradwire.engine.topology import Topology
from gradwire.errors import ConfigError
from gradwire.partition import SEGMENT_BYTES, Kind, Partition, Spec, partition

# Uncompressed bytes of a chunk's segment in memory. Segments let encoding overlap with sending over
# a network; in memory the same cores do both, and a segment has only costs.
IN_MEMORY_BYTES = 16 << 20

# Of the algorithms in two levels, those whose locals may travel uncompressed.
_REDUCING = (Hierarchical, HierarchicalReduceScatter)


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a rank's transport.

    Attributes:
        fifo: whether messages have in-order delivery and no tags; the same on every rank.
        in_memory: whether all messages of all ranks stay in one machine's memory; the same on every
            rank.
        staged: whether it cannot access the kernels' memory.
        lenders: the ranks whose messages can be read in place.
    """

    fifo: bool = False
    in_memory: bool = False
    staged: bool = False
    lenders: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Program:
    """One rank's part of a collective, as columns.

    Attributes:
        graph: its tasks and buffers.
        sizes: payload bytes, sizes[segment][chunk].
        kinds: (codec, dtype) of each kernel that `calls` names.
        calls: the kernel calls, with the rows of their table.
        nbytes: per buffer, bytes of its message, including the header and, where the length depends
            on data, the table.
        offset: per buffer, its offset in the arena; 0 if it is borrowed.
        borrowed: per buffer, whether it is read in the sender's memory.
        readers: per buffer, how many tasks read it.
        arena_bytes: size of all messages; the kernels' workspace follows them.
        wire_bytes: bytes that this rank sends per run, by the algorithm's formula; lengths that
            depend on data count as their codecs expect.
        packings: how a buffer's message is packed, for those whose length depends on data.
        checksum: whether messages carry one.
        stages: the schedule for a `fifo` transport; else empty.
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
    packings: Mapping[int, Packing]
    checksum: bool
    stages: tuple[Wave, ...]


def compile(
    operation: Operation,
    specs: Sequence[Spec],
    topology: Topology,
    capabilities: Capabilities,
    options: Options,
) -> Program:
    """The program of one rank, of tensors that are the same on every rank. For a reduce-scatter or
    all-gather, each spec holds every rank's shard, in rank order.

    Raises:
        ConfigError: the operation does not have the algorithm, a tensor cannot be cut into shards,
            `nodes` does not have one entry per rank, or a checksum is requested in stream order.
    """
    if capabilities.fifo and options.checksum:
        raise ConfigError(
            "these tensors travel in stream order, where the host cannot compare a checksum: leave "
            "Options(checksum=None)"
        )
    rank, world_size = topology.rank, topology.world_size
    algorithm = algorithm_of(operation, topology, options)
    # A GPU's kernels and its messages do not compete for the same cores.
    in_memory = capabilities.in_memory and not capabilities.fifo
    parts = cut(operation, specs, algorithm, world_size, options, in_memory)
    graph = algorithm.build(rank, world_size, parts.sizes)
    packed = {} if capabilities.fifo else packings(graph, parts)
    nbytes = message_bytes(graph, parts.sizes)
    for buffer, packing in packed.items():
        nbytes[buffer] += packing.table_bytes
    # Messages cannot be read in place where coordinated rounds expect sends to end once the message
    # has left, where links and pinned memory copy messages anyway, and for triton's kernels, which
    # need equal distances.
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
    # Where the host does not read messages, they travel at their greatest size.
    sizes = parts.sizes if capabilities.fifo else expected(parts)[0]
    hop = partial(algorithm.hop, world_size=world_size)
    return Program(
        graph=graph,
        sizes=parts.sizes,
        kinds=parts.kinds,
        calls=kernel_calls(graph, parts, specs, offsets, rank, options.batched),
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
    operation: Operation,
    specs: Sequence[Spec],
    algorithm: Algorithm,
    world_size: int,
    options: Options,
    in_memory: bool,
) -> Partition:
    """The tensors, cut for an algorithm; `in_memory` as of Capabilities."""
    return partition(
        specs,
        chunks=options.partitions or algorithm.chunks(world_size),
        segments=options.segments,
        plain=isinstance(algorithm, _REDUCING) and algorithm.inside == "full",
        shards=operation.shards,
        segment_bytes=IN_MEMORY_BYTES if in_memory else SEGMENT_BYTES,
    )


def message_bytes(graph: Graph, sizes: Sizes) -> list[int]:
    """Bytes of each buffer's message, header included."""
    places = zip(graph.buffer_segment, graph.buffer_chunk, strict=True)
    return [message(sizes[segment][chunk]) for segment, chunk in places]


def algorithm_of(operation: Operation, topology: Topology, options: Options) -> Algorithm:
    """The algorithm of a collective.

    Raises:
        ConfigError: `check_algorithm` rejects it, or `nodes` does not have one entry per rank.
    """
    check_algorithm(operation, options, topology.world_size, str(operation))
    algorithm = algorithms.OF[operation.verb][options.algorithm]
    if options.coordinated:
        return Coordinated(algorithm)
    if isinstance(algorithm, (*_REDUCING, HierarchicalAllGather)):
        nodes = topology.machines if options.nodes is None else options.nodes
        if len(nodes) != topology.world_size:
            raise ConfigError(
                f"nodes={nodes}: give a machine for each of the {topology.world_size} ranks"
            )
        algorithm = replace(algorithm, nodes=nodes)
        if isinstance(algorithm, _REDUCING):
            algorithm = replace(algorithm, inside=options.inside)
        if isinstance(algorithm, Hierarchical):
            algorithm = replace(algorithm, between=options.between)
    if isinstance(algorithm, (ScatterAllGather, Tree)):
        return replace(algorithm, root=operation.root)
    return algorithm
