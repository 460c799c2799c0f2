"""How tensors are cut for a collective: rows, chunks, segments, and where each lies in its message.

A *row* is a contiguous piece of one tensor, the unit of a kernel's segment table. A tensor of n
values in blocks of B is cut into `world_size` chunks of whole blocks; chunk k goes to rank (k +
rotation) mod world_size, so that the remainders of many small tensors spread over the ranks.
Nothing else enters, above all not how DDP happens to bucket: so a tensor's result is the same in
whatever company it travels (law 8).

Segments cut each rank's rows once more, at block boundaries, to pipeline. A tensor-scope codec's
rows are never cut: their payload would change. Within a message rows stand in the order of their
tensors, each at a multiple of 16 bytes, behind the header.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.engine.message import align
from gradwire.lang import Codec, layout

# Of uncompressed values in a chunk: large enough to hide what a kernel call and a message cost.
_SEGMENT_BYTES = 4 << 20
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
        rotation: chunk k belongs to rank (k + rotation) mod world_size.
    """

    name: str
    numel: int
    dtype: torch.dtype
    codec: Codec
    feedback: bool = False
    rotation: int = 0

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


@dataclass(frozen=True)
class Partition:
    """Every row of a collective, and the payload bytes of each message, `sizes[segment][chunk]`."""

    rows: tuple[Row, ...]
    sizes: tuple[tuple[int, ...], ...]


def partition(specs: Sequence[Spec], world_size: int, segments: int | None = None) -> Partition:
    """Cut the tensors of `specs`; the same on every rank.

    Args:
        segments: pipeline units; None chooses by size.
    """
    shares: list[list[Piece]] = [[] for _ in range(world_size)]
    for item, spec in enumerate(specs):
        block = layout(spec.codec, spec.dtype).block
        for k in range(world_size):
            first = k * spec.blocks // world_size * block
            last = min((k + 1) * spec.blocks // world_size * block, spec.numel)
            if last > first:
                shares[(k + spec.rotation) % world_size].append((item, first, last - first))
    if segments is None:
        raw = max(sum(n * specs[i].dtype.itemsize for i, _, n in share) for share in shares)
        segments = min(max(-(-raw // _SEGMENT_BYTES), 1), _MAX_SEGMENTS)

    rows: list[Row] = []
    sizes = [[0] * world_size for _ in range(segments)]
    for chunk, share in enumerate(shares):
        for segment, piece in _pipeline(specs, share, segments):
            item, start, numel = piece
            offset = sizes[segment][chunk]
            rows.append(Row(item, start, numel, segment, chunk, offset))
            nbytes = layout(specs[item].codec, specs[item].dtype).nbytes(numel)
            sizes[segment][chunk] += align(nbytes)
    return Partition(tuple(rows), tuple(map(tuple, sizes)))


def _pipeline(specs: Sequence[Spec], share: list[Piece], segments: int) -> list[tuple[int, Piece]]:
    """Cut one rank's share into `segments` parts of about equal payload: (segment, row) pairs."""
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
