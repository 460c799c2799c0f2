"""From a bucket to what its tasks take: cut as gradwire.collectives does, timed by curves.

Where one node is simulated for all, chunks are given their mean size first, so that all ranks do
the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradwire.algorithms import Algorithm
from gradwire.algorithms.protocol import message
from gradwire.collectives import Options
from gradwire.collectives.calls import covered_messages, form
from gradwire.collectives.compile import CollectiveLayout, algorithm_of, cut, message_bytes
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
        sizes: bytes of payloads, as algorithms take them.
        kinds: (codec, whether a residual travels with the values).
        values: float64[chunk, segment, kind]: how many values.
    """

    sizes: tuple[tuple[int, ...], ...]
    kinds: tuple[tuple[Codec, bool], ...]
    values: np.ndarray


def algorithm_on(options: Options, world_size: int, per_node: int) -> Algorithm:
    """What runs an all-reduce on nodes of `per_node` ranks."""
    nodes = tuple(rank // per_node for rank in range(world_size))
    return algorithm_of("all_reduce", Topology(0, world_size, nodes), options)


def amounts(
    bucket: Bucket, algorithm: Algorithm, options: Options, world_size: int, in_memory: bool = False
) -> Amounts:
    """Cut a bucket for an algorithm; `in_memory` if all ranks are on one node."""
    parts = cut(CollectiveLayout("all_reduce", bucket), algorithm, world_size, options, in_memory)
    feedback = np.array([spec.feedback for spec in bucket], dtype="i8")
    kinds = tuple((codec, kept) for codec, _ in parts.kinds for kept in (False, True))
    shape = len(parts.sizes[0]), len(parts.sizes), len(kinds)
    message = parts.chunk * len(parts.sizes) + parts.segment
    place = message * len(kinds) + parts.kind * 2 + feedback[parts.item]
    values = np.bincount(place, parts.numel, int(np.prod(shape))).reshape(shape)
    return Amounts(parts.sizes, kinds, values)


def level(held: Amounts, chunks: int) -> Amounts:
    """The same values in chunks of equal size; `chunks` at a time have one form."""
    forms = len(held.values) // chunks
    sizes = []
    for segment in held.sizes:
        means = np.array(segment).reshape(forms, chunks).sum(axis=1) / chunks
        sizes.append(tuple(align(int(mean)) for mean in np.ceil(means).repeat(chunks)))
    values = held.values.reshape(forms, chunks, *held.values.shape[1:]).sum(axis=1) / chunks
    return Amounts(tuple(sizes), held.kinds, values.repeat(chunks, axis=0))


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
    return Timed(graph, seconds, nbytes, message(max(map(max, held.sizes))))


def _seconds(graph: Graph, task: int, held: Amounts, nbytes: list[int], curves: Curves) -> float:
    """One kernel call for each codec and form, and a header for each message that is made."""
    covered = covered_messages(graph, task)
    chunks = [graph.buffer_chunk[b] for b in covered]
    values = held.values[chunks, [graph.buffer_segment[b] for b in covered]].cumsum(axis=0)[-1]
    calls: dict[tuple[Codec, str], float] = {}
    for (codec, feedback), numel in zip(held.kinds, values.tolist(), strict=True):
        if numel:
            call = codec, form(graph, task, feedback)
            calls[call] = calls.get(call, 0.0) + numel
    payloads = len(graph.reads[task]) if graph.kind[task] is Kind.MERGE else 0
    e = curves.engine
    seconds = 0.0
    for (codec, name), numel in calls.items():
        seconds += curves.seconds(codec, name, numel, payloads)
    return seconds + sum(e.check + nbytes[b] * e.check_byte for b in graph.writes[task])
