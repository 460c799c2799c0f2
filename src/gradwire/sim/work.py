"""From a bucket to what its tasks take: cut as gradwire.collectives does, timed by curves.

Where one node is simulated for all, chunks are given their mean size first, so that all ranks do
the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradwire.algorithms import Algorithm
from gradwire.algorithms.protocol import message
from gradwire.collectives import AVERAGE, Options
from gradwire.collectives.calls import covered_messages, form
from gradwire.collectives.compile import CollectiveLayout, algorithm_of, cut, message_bytes
from gradwire.collectives.packing import expected
from gradwire.engine import Graph, Kind
from gradwire.engine.message import align
from gradwire.engine.topology import Topology
from gradwire.lang import Codec
from gradwire.sim.buckets import Bucket
from gradwire.sim.curves import Curves
from gradwire.sim.rank import Timed


@dataclass(frozen=True)
class Amounts:
    """What the messages of a bucket hold.

    Attributes:
        sizes: bytes of payloads, as algorithms take them; where lengths depend on data, those that
            codecs expect, and the table that says them.
        tables: what of these is the table.
        kinds: (codec, whether a residual travels with the values).
        values: float64[chunk, segment, kind]: how many values.
    """

    sizes: tuple[tuple[int, ...], ...]
    tables: tuple[tuple[int, ...], ...]
    kinds: tuple[tuple[Codec, bool], ...]
    values: np.ndarray


def algorithm_on(options: Options, world_size: int, per_node: int) -> Algorithm:
    """What runs an all-reduce on nodes of `per_node` ranks."""
    nodes = tuple(rank // per_node for rank in range(world_size))
    return algorithm_of(AVERAGE, Topology(0, world_size, nodes), options)


def amounts(
    bucket: Bucket, algorithm: Algorithm, options: Options, world_size: int, in_memory: bool = False
) -> Amounts:
    """Cut a bucket for an algorithm; `in_memory` if all ranks are on one node."""
    parts = cut(CollectiveLayout(AVERAGE, bucket), algorithm, world_size, options, in_memory)
    feedback = np.array([spec.feedback for spec in bucket], dtype="i8")
    kinds = tuple((codec, kept) for codec, _ in parts.kinds for kept in (False, True))
    shape = len(parts.sizes[0]), len(parts.sizes), len(kinds)
    message = parts.chunk * len(parts.sizes) + parts.segment
    place = message * len(kinds) + parts.kind * 2 + feedback[parts.item]
    values = np.bincount(place, parts.numel, int(np.prod(shape))).reshape(shape)
    return Amounts(*expected(parts), kinds, values)


def level(held: Amounts, chunks: int) -> Amounts:
    """The same values in chunks of equal size; `chunks` at a time have one form."""
    forms = len(held.values) // chunks

    def means(sizes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        sums = (np.array(segment).reshape(forms, chunks).sum(axis=1) for segment in sizes)
        found = (np.ceil(of_forms / chunks).repeat(chunks) for of_forms in sums)
        return tuple(tuple(align(int(mean)) for mean in segment) for segment in found)

    values = held.values.reshape(forms, chunks, *held.values.shape[1:]).sum(axis=1) / chunks
    return Amounts(means(held.sizes), means(held.tables), held.kinds, values.repeat(chunks, axis=0))


def timed(held: Amounts, algorithm: Algorithm, rank: int, world_size: int, curves: Curves) -> Timed:
    """A cut bucket on `rank`.

    Raises:
        ConfigError: a codec without a curve.
    """
    graph = algorithm.build(rank, world_size, held.sizes)
    nbytes = message_bytes(graph, held.sizes)
    seconds = [
        _seconds(graph, task, held, nbytes, curves) if peer < 0 else 0.0
        for task, peer in enumerate(graph.peer)
    ]
    places = zip(graph.buffer_segment, graph.buffer_chunk, strict=True)
    tables = [held.tables[segment][chunk] for segment, chunk in places]
    moved = (
        sum(nbytes[b] for b in graph.message(t)) for t, peer in enumerate(graph.peer) if peer >= 0
    )
    largest = max(message(max(map(max, held.sizes))), *moved, 0)
    return Timed(graph, seconds, nbytes, largest, tables)


def _seconds(graph: Graph, task: int, held: Amounts, nbytes: list[int], curves: Curves) -> float:
    """A kernel's curve for each codec and form, and a check for each message that is made.

    Target c runs them in one call, but a curve does not tell Python's part of what a call costs.
    """
    covered = covered_messages(graph, task)
    chunks = [graph.buffer_chunk[b] for b in covered]
    values = held.values[chunks, [graph.buffer_segment[b] for b in covered]].cumsum(axis=0)[-1]
    calls: dict[tuple[Codec, str], float] = {}
    for (codec, feedback), numel in zip(held.kinds, values.tolist(), strict=True):
        if numel:
            call = codec, form(graph, task, feedback)
            calls[call] = calls.get(call, 0.0) + numel
    payloads = 0
    if graph.reads[task] and graph.kind[task] is Kind.MERGE:
        payloads = len(graph.reads[task]) // graph.width(task)
    e = curves.engine
    seconds = 0.0
    for (codec, name), numel in calls.items():
        seconds += curves.seconds(codec, name, numel, payloads)
    messages = len(graph.together(task))
    return seconds + messages * e.check + e.check_byte * sum(nbytes[b] for b in graph.writes[task])
