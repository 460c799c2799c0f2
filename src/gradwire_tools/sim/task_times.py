"""The durations of a collective's tasks: its tensors are cut as in gradwire.collectives and timed
by curves.

Where one node represents all, chunks first get their mean size, so that all ranks are symmetric.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradwire.algorithms import Algorithm
from gradwire.algorithms.protocol import message
from gradwire.collectives import AVERAGE, Operation, Options
from gradwire.collectives.calls import covered_messages, form
from gradwire.collectives.compile import algorithm_of, cut, message_bytes
from gradwire.collectives.packing import expected
from gradwire.engine import Graph, Kind
from gradwire.engine.message import align
from gradwire.engine.topology import Topology
from gradwire.lang import Codec
from gradwire.lang.exact import Exact
from gradwire.partition import Spec
from gradwire_tools.sim.curves import Curves
from gradwire_tools.sim.rank import TimedGraph


@dataclass(frozen=True)
class BucketContents:
    """The contents of a collective's messages.

    Attributes:
        sizes: bytes of payloads, as algorithms take them; where lengths depend on data, the
            codec's expected length plus the table of lengths.
        tables: bytes of these tables.
        kinds: (codec, whether error feedback applies).
        values: float64[chunk, segment, kind]: number of values.
        calls: of the same shape: number of tensors, each of which has a kernel call; None where
            one call covers all tensors of a task.
    """

    sizes: tuple[tuple[int, ...], ...]
    tables: tuple[tuple[int, ...], ...]
    kinds: tuple[tuple[Codec, bool], ...]
    values: np.ndarray
    calls: np.ndarray | None = None


def algorithm_on(
    options: Options, world_size: int, per_node: int, operation: Operation = AVERAGE
) -> Algorithm:
    """The algorithm of a collective on nodes of `per_node` ranks."""
    nodes = tuple(rank // per_node for rank in range(world_size))
    return algorithm_of(operation, Topology(0, world_size, nodes), options)


def bucket_contents(
    specs: Sequence[Spec],
    algorithm: Algorithm,
    options: Options,
    world_size: int,
    in_memory: bool = False,
    operation: Operation = AVERAGE,
) -> BucketContents:
    """Cut tensors for an algorithm; `in_memory` if all ranks are on one node."""
    parts = cut(operation, specs, algorithm, world_size, options, in_memory)
    feedback = np.array([spec.feedback for spec in specs], dtype="i8")
    # What is copied takes time by its bytes.
    weight = [d.itemsize / 4 if isinstance(codec, Exact) else 1.0 for codec, d in parts.kinds]
    kinds = tuple((codec, kept) for codec, _ in parts.kinds for kept in (False, True))
    shape = len(parts.sizes[0]), len(parts.sizes), len(kinds)
    message = parts.chunk * len(parts.sizes) + parts.segment
    place = message * len(kinds) + parts.kind * 2 + feedback[parts.item]
    values = np.bincount(
        place, parts.numel * np.array(weight)[parts.kind], int(np.prod(shape))
    ).reshape(shape)
    calls = None
    if not options.batched:
        calls = np.bincount(place, minlength=values.size).reshape(shape)
    return BucketContents(*expected(parts), kinds, values, calls)


def equal_chunks(contents: BucketContents, chunks: int) -> BucketContents:
    """The same values in chunks of equal size; each `chunks` chunks have one form."""
    forms = len(contents.values) // chunks

    def means(sizes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        sums = (np.array(segment).reshape(forms, chunks).sum(axis=1) for segment in sizes)
        found = (np.ceil(of_forms / chunks).repeat(chunks) for of_forms in sums)
        return tuple(tuple(align(int(mean)) for mean in segment) for segment in found)

    def mean(of: np.ndarray) -> np.ndarray:
        summed: np.ndarray = of.reshape(forms, chunks, *of.shape[1:]).sum(axis=1) / chunks
        return summed.repeat(chunks, axis=0)

    sizes, tables = means(contents.sizes), means(contents.tables)
    calls = None if contents.calls is None else np.ceil(mean(contents.calls))
    return BucketContents(sizes, tables, contents.kinds, mean(contents.values), calls)


def timed_graph(
    contents: BucketContents, algorithm: Algorithm, rank: int, world_size: int, curves: Curves
) -> TimedGraph:
    """The graph of a collective on `rank`, with the durations of its tasks.

    Raises:
        ConfigError: a codec has no curve.
    """
    graph = algorithm.build(rank, world_size, contents.sizes)
    nbytes = message_bytes(graph, contents.sizes)
    seconds = [
        _seconds(graph, task, contents, nbytes, curves) if peer < 0 else 0.0
        for task, peer in enumerate(graph.peer)
    ]
    places = zip(graph.buffer_segment, graph.buffer_chunk, strict=True)
    tables = [contents.tables[segment][chunk] for segment, chunk in places]
    moved = (
        sum(nbytes[b] for b in graph.message(t)) for t, peer in enumerate(graph.peer) if peer >= 0
    )
    largest = max(message(max(map(max, contents.sizes))), *moved, 0)
    return TimedGraph(graph, seconds, nbytes, largest, tables)


def _seconds(
    graph: Graph, task: int, contents: BucketContents, nbytes: list[int], curves: Curves
) -> float:
    """The kernel time of a task: the curve of each codec and form, and a checksum per message made.

    Target c runs all codecs in one call, but a curve does not separate Python's share of a call.
    """
    covered = covered_messages(graph, task)
    chunks = [graph.buffer_chunk[b] for b in covered]
    at = chunks, [graph.buffer_segment[b] for b in covered]
    values = contents.values[at].cumsum(axis=0)[-1]
    counts: np.ndarray = np.ones(len(values))
    if contents.calls is not None:
        counts = contents.calls[at].cumsum(axis=0)[-1]
    work: dict[tuple[Codec, str], tuple[float, float]] = {}
    for (codec, kept), numel, count in zip(contents.kinds, values, counts, strict=True):
        if numel:
            call = codec, form(graph, task, kept)
            known = work.get(call, (0.0, 0.0))
            work[call] = known[0] + float(numel), max(known[1], float(count))
    payloads = 0
    if graph.reads[task] and graph.kind[task] is Kind.MERGE:
        payloads = len(graph.reads[task]) // graph.width(task)
    e = curves.engine
    seconds = 0.0
    for (codec, name), (numel, count) in work.items():
        more = count - 1  # calls beyond the first
        seconds += curves.seconds(codec, name, numel, payloads)
        seconds += more * curves.seconds(codec, name, 0, payloads)
    messages = len(graph.together(task))
    return seconds + messages * e.check + e.check_byte * sum(nbytes[b] for b in graph.writes[task])
