"""From a bucket to what its tasks take: the partition, the algorithm's graph, the kernels' curves.

Where one node is simulated for all, chunks are given their mean size first, so that all ranks do
the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from gradwire import algorithms
from gradwire.algorithms import Algorithm, Coordinated, Hierarchical
from gradwire.collectives import Options
from gradwire.collectives.calls import covered_messages, form
from gradwire.collectives.prepared import IN_MEMORY_BYTES
from gradwire.engine import HEADER_BYTES, Graph, Kind
from gradwire.engine.message import align
from gradwire.lang import Codec
from gradwire.partition import SEGMENT_BYTES, partition
from gradwire.sim.buckets import Bucket
from gradwire.sim.curves import Curves
from gradwire.sim.rank import Timed

# (codec, whether a residual travels with the values) -> how many values
Amounts = Mapping[tuple[Codec, bool], float]


@dataclass(frozen=True)
class Cut:
    """A bucket, cut for an algorithm.

    Attributes:
        sizes: of payloads, as algorithms take them.
        amounts: (segment, chunk) -> what a message holds.
    """

    sizes: tuple[tuple[int, ...], ...]
    amounts: Mapping[tuple[int, int], Amounts]


def algorithm_of(options: Options, world_size: int, per_node: int) -> Algorithm:
    """What runs an all-reduce: as gradwire.collectives does, on nodes of `per_node` ranks."""
    algorithm = algorithms.get(options.algorithm)
    if isinstance(algorithm, Hierarchical):
        nodes = options.nodes or tuple(rank // per_node for rank in range(world_size))
        return Hierarchical(nodes, options.inside)
    return Coordinated(algorithm) if options.coordinated else algorithm


def cut(
    bucket: Bucket, algorithm: Algorithm, options: Options, world_size: int, in_memory: bool = False
) -> Cut:
    """Cut a bucket as gradwire.collectives does; `in_memory` if all ranks are on one node."""
    plain = isinstance(algorithm, Hierarchical) and algorithm.inside == "full"
    chunks = options.partitions or algorithm.chunks(world_size)
    segment_bytes = IN_MEMORY_BYTES if in_memory else SEGMENT_BYTES
    parts = partition(bucket, chunks, options.segments, plain, segment_bytes=segment_bytes)
    amounts: dict[tuple[int, int], Counter[tuple[Codec, bool]]] = {}
    for row in parts.rows:
        held = amounts.setdefault((row.segment, row.chunk), Counter())
        held[row.codec, bucket[row.item].feedback] += row.numel
    return Cut(parts.sizes, amounts)


def level(parts: Cut, chunks: int) -> Cut:
    """The same values in chunks of equal size; `chunks` at a time have one form."""
    sizes, amounts = [], {}
    for s, segment in enumerate(parts.sizes):
        levelled: list[int] = []
        for first in range(0, len(segment), chunks):
            columns = range(first, first + chunks)
            total: Counter[tuple[Codec, bool]] = Counter()
            for c in columns:
                total.update(parts.amounts.get((s, c), {}))
            mean = {kind: values / chunks for kind, values in total.items()}
            amounts.update({(s, c): mean for c in columns})
            size = sum(segment[first : first + chunks]) / chunks
            levelled += [align(-int(-size // 1))] * chunks
        sizes.append(tuple(levelled))
    return Cut(tuple(sizes), amounts)


def timed(parts: Cut, algorithm: Algorithm, rank: int, world_size: int, curves: Curves) -> Timed:
    """A cut bucket on `rank`.

    Raises:
        ConfigError: a codec without a curve.
    """
    graph = algorithm.build(rank, world_size, parts.sizes)
    nbytes = {
        (s, c): size + HEADER_BYTES
        for s, segment in enumerate(parts.sizes)
        for c, size in enumerate(segment)
    }
    seconds = tuple(_seconds(graph, task, parts, nbytes, curves) for task in range(len(graph)))
    return Timed(graph, seconds, nbytes)


def _seconds(
    graph: Graph, task: int, parts: Cut, nbytes: Mapping[tuple[int, int], int], curves: Curves
) -> float:
    """One kernel call for each codec and form, and a header for each message that is made."""
    if graph.peer[task] >= 0:
        return 0.0
    segment, chunk = graph.buffer_segment, graph.buffer_chunk
    held: Counter[tuple[Codec, str]] = Counter()
    for m in covered_messages(graph, task):
        for (codec, feedback), values in parts.amounts[segment[m], chunk[m]].items():
            held[codec, form(graph, task, feedback)] += values  # type: ignore[assignment]
    payloads = len(graph.reads[task]) if graph.kind[task] is Kind.MERGE else 0
    kernels = sum(
        curves.seconds(codec, name, values, payloads) for (codec, name), values in held.items()
    )
    e = curves.engine
    return kernels + sum(
        e.check + nbytes[segment[m], chunk[m]] * e.check_byte for m in graph.writes[task]
    )
