"""How tensors are cut for a collective: rows, chunks, segments, and where each lies in its message.

A *row* is a contiguous piece of one tensor, the unit of a kernel's segment table. A tensor of n
values in blocks of B is cut into as many chunks of whole blocks as the algorithm wants; the k-th
piece goes to chunk (k + rotation) mod chunks, so that the remainders of many small tensors spread.
Nothing else enters, above all not how DDP happens to bucket: so a tensor's result is the same in
whatever company it travels (law 8). Where chunks are `shards`, they hold equally many values.

With `plain`, every chunk stands there a second time, uncompressed, as chunk k + chunks: an
algorithm may then send it in either form.

Segments cut each chunk's rows once more, at block boundaries, to pipeline. A tensor-scope codec's
rows are never cut: their payload would change. Within a message rows stand in the order of their
tensors, each at a multiple of 16 bytes, behind the header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from gradwire.codecs import Identity
from gradwire.engine.message import align
from gradwire.errors import ConfigError
from gradwire.lang import Codec, layout

SEGMENT_BYTES = 4 << 20  # large enough to hide what a kernel call and a message cost
_MAX_SEGMENTS = 16

Piece = tuple[int, int, int]  # (item, first value, number of values)


@dataclass(frozen=True)
class Spec:
    """What all ranks know about one tensor of a collective.

    Attributes:
        name: of the parameter; it names the tensor in errors.
        numel: number of values.
        dtype: fp32, fp16 or bf16.
        codec: how its payloads are made.
        feedback: whether a residual travels with it.
        rotation: its k-th piece belongs to chunk (k + rotation) mod chunks.
    """

    name: str
    numel: int
    dtype: torch.dtype
    codec: Codec
    feedback: bool = False
    rotation: int = 0

    def __hash__(self) -> int:
        """Of the fields; computed once, for collectives are looked up by their specs every step."""
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = hash((self.name, self.numel, self.dtype, self.codec, self.feedback))
            object.__setattr__(self, "_hash", known)
        return known

    def __str__(self) -> str:
        ending = ", error feedback" if self.feedback else ""
        what = f"{self.numel} x {self.dtype}, {self.codec}{ending}"
        return f"{self.name}: {what}, rotation {self.rotation}"

    @property
    def blocks(self) -> int:
        return -(-self.numel // layout(self.codec, self.dtype).block)


@dataclass(frozen=True)
class Row:
    """`numel` values of tensor `item` from value `start` on, within message (segment, chunk)."""

    item: int
    start: int
    numel: int
    segment: int
    chunk: int
    offset: int  # of its payload in the message, header not counted
    codec: Codec  # that makes its payload


@dataclass(frozen=True)
class Partition:
    """Every row of a collective, and the payload bytes of each message, `sizes[segment][chunk]`."""

    rows: tuple[Row, ...]
    sizes: tuple[tuple[int, ...], ...]


def partition(
    specs: Sequence[Spec],
    chunks: int,
    segments: int | None = None,
    plain: bool = False,
    shards: bool = False,
    segment_bytes: int = SEGMENT_BYTES,
) -> Partition:
    """Cut the tensors of `specs`; the same on every rank.

    Args:
        chunks: how many, of each segment.
        segments: pipeline units; None chooses by size.
        plain: add every chunk uncompressed.
        shards: cut every tensor into equally many values, and ignore its rotation.
        segment_bytes: where `segments` is None: how much of a chunk, uncompressed, a segment has at
            most, as far as 16 of them suffice.

    Raises:
        ConfigError: a tensor that cannot be cut into shards.
    """
    shares: list[list[Piece]] = [[] for _ in range(chunks)]
    for item, spec in enumerate(specs):
        for k, (first, last) in enumerate(_shards(spec, chunks) if shards else _cut(spec, chunks)):
            if last > first:
                chunk = k if shards else (k + spec.rotation) % chunks
                shares[chunk].append((item, first, last - first))
    if segments is None:
        raw = max(sum(n * specs[i].dtype.itemsize for i, _, n in share) for share in shares)
        segments = min(max(-(-raw // segment_bytes), 1), _MAX_SEGMENTS)

    pieces = [
        (chunk, segment, piece)
        for chunk, share in enumerate(shares)
        for segment, piece in _pipeline(specs, share, segments)
    ]
    rows: list[Row] = []
    sizes = [[0] * chunks * (1 + plain) for _ in range(segments)]
    for uncompressed in (False, True) if plain else (False,):
        for chunk, segment, (item, start, numel) in pieces:
            codec = Identity() if uncompressed else specs[item].codec
            column = chunk + chunks * uncompressed
            rows.append(Row(item, start, numel, segment, column, sizes[segment][column], codec))
            nbytes = layout(codec, specs[item].dtype).nbytes(numel)
            sizes[segment][column] += align(nbytes)
    return Partition(tuple(rows), tuple(map(tuple, sizes)))


def _cut(spec: Spec, chunks: int) -> list[tuple[int, int]]:
    """(first value, end) of each chunk, in whole blocks."""
    block = layout(spec.codec, spec.dtype).block
    ends = [min(k * spec.blocks // chunks * block, spec.numel) for k in range(chunks + 1)]
    return list(pairwise(ends))


def _shards(spec: Spec, chunks: int) -> list[tuple[int, int]]:
    """(first value, end) of each chunk, of equally many values."""
    shard, rest = divmod(spec.numel, chunks)
    if rest:
        raise ConfigError(f"{spec.name}: {spec.numel} values cannot be cut into {chunks} shards")
    return [(k * shard, (k + 1) * shard) for k in range(chunks)]


def _pipeline(specs: Sequence[Spec], share: list[Piece], segments: int) -> list[tuple[int, Piece]]:
    """Cut one chunk's share into `segments` parts of about equal payload: (segment, row) pairs."""
    layouts = [layout(specs[item].codec, specs[item].dtype) for item, _, _ in share]
    total = sum(lay.nbytes(numel) for lay, (_, _, numel) in zip(layouts, share, strict=True))
    pieces: list[tuple[int, Piece]] = []
    done = 0.0
    for lay, (item, start, numel) in zip(layouts, share, strict=True):
        per_value = lay.nbytes(numel) / numel
        while numel:
            segment = min(int(done * segments / total), segments - 1)
            take = numel
            if lay.splittable and segment < segments - 1:
                room = (total * (segment + 1) / segments - done) / per_value
                take = min(max(-(-int(room) // lay.block), 1) * lay.block, numel)
            pieces.append((segment, (item, start, take)))
            start, numel, done = start + take, numel - take, done + take * per_value
    return pieces
