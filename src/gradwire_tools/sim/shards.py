"""What FSDP2 sends for one group of parameters: how its tensors are cut, encoded and sent.

A parameter is cut by rows: rank r has rows r * m to (r + 1) * m, of which m = ceil(rows / N), and
the last ranks have fewer. gradwire's gathers move payloads of bytes, encoded before and decoded
after (gradwire.handles.weights); its reduce-scatters have a codec per parameter
(gradwire.handles.scatter), and so have all-reduces of shards between replicas (HSDP). Torch's
collectives move all values, padding included, at one width.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch

from gradwire.codecs import Identity
from gradwire.collectives import Operation
from gradwire.lang import Codec, layout
from gradwire.lang.exact import Exact
from gradwire.partition import Spec
from gradwire_tools.sim.curves import Curves
from gradwire_tools.sim.models import Shape, Shapes
from gradwire_tools.sim.rank import TimedGraph

GATHER = Operation("all_gather")
SCATTER = Operation("reduce_scatter", "sum")
HOP = Operation("all_reduce", "sum")  # between replicas

_BYTES = Exact("")

Specs = tuple[Spec, ...]


@dataclass(frozen=True)
class Torch:
    """Torch's collectives, of values cast to `width` bytes.

    Attributes:
        ratio: only the first 1/ratio of each rank's part is sent (fake compression).
    """

    width: int
    ratio: float = 1.0


@dataclass(frozen=True)
class Coded:
    """gradwire's gathers of weights.

    Attributes:
        choose: (dimensions, number of values) of a parameter -> its codec; None: uncompressed.
        keep: what ranks keep of forward's weights; see gradwire.planner.weights.
    """

    choose: Callable[[int, int], Codec | None]
    keep: str = "none"


Weights = Coded | Torch
Gradients = Codec | Torch


@dataclass(frozen=True)
class Gathered:
    """One gather of a group's weights.

    Attributes:
        bucket: what is sent.
        encoded, decoded: by codec, values that rank 0 encodes before, and decodes after.
    """

    bucket: Specs
    encoded: dict[Codec, int]
    decoded: dict[Codec, int]

    def seconds(self, curves: Curves) -> tuple[float, float]:
        """To encode and to decode. Raises ConfigError: a codec has no curve."""
        encode = sum(curves.seconds(c, "encode", n, 0) for c, n in self.encoded.items())
        return encode, sum(curves.seconds(c, "decode", n, 0) for c, n in self.decoded.items())


def gathered(group: Shapes, weights: Weights, ranks: int) -> Gathered:
    """The gather of a group's fp32 weights."""
    if isinstance(weights, Torch):
        return Gathered((_whole(group, weights, ranks, _BYTES),), {}, {})
    encoded: Counter[Codec] = Counter()
    decoded: Counter[Codec] = Counter()
    payloads = [0] * ranks
    for shape in group:
        codec = weights.choose(len(shape), math.prod(shape)) or Identity()
        shards = lengths(shape, ranks)
        encoded[codec] += shards[0]
        decoded[codec] += sum(shards)
        of = layout(codec, torch.float32)
        payloads = [sent + of.nbytes(n) for sent, n in zip(payloads, shards, strict=True)]
    name = "payloads of weights"
    spec = Spec(name, sum(payloads), torch.uint8, _BYTES, lengths=tuple(payloads))
    return Gathered((spec,), dict(encoded), dict(decoded))


def scattered(group: Shapes, gradients: Gradients, feedback: bool, ranks: int) -> Specs:
    """The reduce-scatter of a group's fp32 gradients; those of fewer than two dimensions are sent
    uncompressed, as in gradwire.planner."""
    if isinstance(gradients, Torch):
        return (_whole(group, gradients, ranks, Exact("sum")),)
    specs = []
    for number, shape in enumerate(group):
        coded = len(shape) > 1
        codec = gradients if coded else Identity()
        shards = lengths(shape, ranks)
        feeds = feedback and coded
        specs.append(Spec(str(number), sum(shards), torch.float32, codec, feeds, lengths=shards))
    return tuple(specs)


def hopped(group: Shapes, gradients: Gradients, feedback: bool, shards: int, shard: int) -> Specs:
    """The all-reduce between replicas of a shard of a group's fp32 gradients."""
    if isinstance(gradients, Torch):
        whole = _whole(group, gradients, shards, Exact("sum"))
        return (replace(whole, numel=whole.lengths[0], lengths=()),)
    specs = scattered(group, gradients, feedback, shards)
    return tuple(replace(spec, numel=spec.lengths[shard], lengths=()) for spec in specs)


def _whole(group: Shapes, by: Torch, ranks: int, codec: Codec) -> Spec:
    """A group's values with padding, as bytes."""
    each = by.width * math.ceil(sum(lengths(shape, ranks)[0] for shape in group) / by.ratio)
    return Spec("values", each * ranks, torch.uint8, codec, lengths=(each,) * ranks)


def lengths(shape: Shape, ranks: int) -> tuple[int, ...]:
    """How many values of a parameter each rank has; rank 0 has the most, which is what others are
    padded to."""
    rows, row = shape[0], math.prod(shape[1:])
    most = -(-rows // ranks)
    return tuple(min(max(rows - rank * most, 0), most) * row for rank in range(ranks))


def by_torch(timed: TimedGraph, bucket: Specs, ranks: int) -> TimedGraph:
    """The graph of a bucket, in one segment, as torch's collective would run it at best: messages
    have no headers, and kernels take no time."""
    (spec,) = bucket
    each = spec.lengths[0] if spec.lengths else -(-spec.numel // ranks)
    sizes = [each if nbytes else 0 for nbytes in timed.nbytes]
    return replace(timed, seconds=[0.0] * len(timed.seconds), nbytes=sizes, largest=each)


def placed(timed: TimedGraph, ranks: Sequence[int]) -> TimedGraph:
    """A graph of a part of the ranks, given by their numbers among all."""
    graph = copy(timed.graph)
    graph.peer = [peer if peer < 0 else ranks[peer] for peer in graph.peer]
    return replace(timed, graph=graph)


def codecs_of(groups: Sequence[Shapes], weights: Weights, *gradients: Gradients) -> set[Codec]:
    """The codecs whose curves are needed."""
    needed: set[Codec] = {Identity()}
    for group in groups:
        needed |= gathered(group, weights, 1).decoded.keys()
    return needed | {one for one in gradients if isinstance(one, Codec)}
