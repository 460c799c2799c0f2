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

import numpy as np
import torch

from gradwire.codecs import Identity
from gradwire.engine.message import ALIGNMENT
from gradwire.errors import ConfigError
from gradwire.lang import Codec, layout

SEGMENT_BYTES = 4 << 20  # large enough to hide what a kernel call and a message cost
_MAX_SEGMENTS = 16

Kind = tuple[Codec, torch.dtype]  # of payloads


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
class Partition:
    """Every row of a collective, as columns, and the payload bytes of each message.

    Rows stand by chunk, within it by segment, and within that in the order of their tensors; so a
    message's rows are a stretch of them.

    Attributes:
        kinds: (codec, dtype) of payloads, in the order in which rows first have them.
        kind: of each row, which of these.
        item: which tensor it is a piece of.
        start, numel: its values in that tensor.
        segment, chunk: its message.
        offset: of its payload in the message, header not counted.
        first: rows of message (segment, chunk) begin at first[chunk * segments + segment], and end
            where the next message's begin.
        sizes: sizes[segment][chunk], in bytes.
    """

    kinds: tuple[Kind, ...]
    kind: np.ndarray
    item: np.ndarray
    start: np.ndarray
    numel: np.ndarray
    segment: np.ndarray
    chunk: np.ndarray
    offset: np.ndarray
    first: np.ndarray
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
    start, numel = _shards(specs, chunks) if shards else _cut(specs, chunks)
    if segments is None:
        itemsizes = np.array([spec.dtype.itemsize for spec in specs], dtype="i8")
        raw = int((numel * itemsizes).sum(axis=1).max())
        segments = min(max(-(-raw // segment_bytes), 1), _MAX_SEGMENTS)
    chunk, segment, item, start, numel = _pipeline(specs, start, numel, segments)

    forms: list[list[Kind]] = [[(spec.codec, spec.dtype) for spec in specs]]
    if plain:
        forms.append([(Identity(), spec.dtype) for spec in specs])
    present = dict.fromkeys(item.tolist())
    kinds = tuple(dict.fromkeys(form[i] for form in forms for i in present))
    number = {kind: n for n, kind in enumerate(kinds)}
    numbers = [np.array([number.get(kind, -1) for kind in form], dtype="i8") for form in forms]
    kind = np.concatenate([of_item[item] for of_item in numbers])
    chunk = np.concatenate([chunk + chunks * n for n in range(len(forms))])
    segment, item, start, numel = (np.tile(c, len(forms)) for c in (segment, item, start, numel))

    rows = np.bincount(chunk * segments + segment, minlength=chunks * len(forms) * segments)
    first = np.concatenate([[0], rows.cumsum()])
    nbytes = _nbytes(kinds, kind, numel)
    ends = np.concatenate([[0], (nbytes + -nbytes % ALIGNMENT).cumsum()])
    offset = ends[:-1] - np.repeat(ends[first[:-1]], rows)
    sizes = np.diff(ends[first]).reshape(-1, segments).T.tolist()
    columns = (kind, item, start, numel, segment, chunk, offset, first)
    return Partition(kinds, *columns, tuple(map(tuple, sizes)))


def _cut(specs: Sequence[Spec], chunks: int) -> tuple[np.ndarray, np.ndarray]:
    """(first value, number of values) of each chunk's piece of each tensor: int64[chunks, items],
    in whole blocks."""
    block = np.array([layout(spec.codec, spec.dtype).block for spec in specs], dtype="i8")
    numel = np.array([spec.numel for spec in specs], dtype="i8")
    rotation = np.array([spec.rotation for spec in specs], dtype="i8")
    blocks = -(-numel // block)
    piece = (np.arange(chunks)[:, None] - rotation) % chunks
    begin, end = (np.minimum(k * blocks // chunks * block, numel) for k in (piece, piece + 1))
    return begin, end - begin


def _shards(specs: Sequence[Spec], chunks: int) -> tuple[np.ndarray, np.ndarray]:
    """The same, of equally many values."""
    for spec in specs:
        if spec.numel % chunks:
            raise ConfigError(
                f"{spec.name}: {spec.numel} values cannot be cut into {chunks} shards"
            )
    shard = np.array([spec.numel // chunks for spec in specs], dtype="i8")
    return np.arange(chunks)[:, None] * shard, np.tile(shard, (chunks, 1))


def _pipeline(
    specs: Sequence[Spec], start: np.ndarray, numel: np.ndarray, segments: int
) -> tuple[np.ndarray, ...]:
    """Cut the pieces of each chunk into `segments` parts of about equal payload.

    Returns:
        Of each row: chunk, segment, item, start, numel.
    """
    chunk, item = numel.nonzero()
    if segments == 1:
        return chunk, np.zeros_like(chunk), item, start[chunk, item], numel[chunk, item]
    nbytes = np.zeros_like(numel)
    for i, spec in enumerate(specs):
        nbytes[:, i] = _nbytes([(spec.codec, spec.dtype)], np.zeros_like(start[:, i]), numel[:, i])
    total = nbytes.sum(axis=1)
    done = np.zeros(len(numel))
    rows: list[tuple[np.ndarray, ...]] = []
    for i, spec in enumerate(specs):
        lay = layout(spec.codec, spec.dtype)
        chunk = numel[:, i].nonzero()[0]
        at, left = start[chunk, i], numel[chunk, i]
        per_value = nbytes[chunk, i] / left
        while len(chunk):  # a row in each chunk that has not all of its piece
            before, whole = done[chunk], total[chunk]
            segment = np.minimum((before * segments / whole).astype("i8"), segments - 1)
            take = left
            if lay.splittable:
                room = ((whole * (segment + 1) / segments - before) / per_value).astype("i8")
                blocks = np.maximum(-(-room // lay.block), 1)
                last = segment == segments - 1
                take = np.where(last, left, np.minimum(blocks * lay.block, left))
            rows.append((chunk, segment, np.full_like(chunk, i), at, take))
            done[chunk] += take * per_value
            more = take < left
            chunk, per_value = chunk[more], per_value[more]
            at, left = (at + take)[more], (left - take)[more]
    if not rows:
        return chunk, chunk, item, item, item
    columns = tuple(np.concatenate(column) for column in zip(*rows, strict=True))
    order = columns[0].argsort(kind="stable")  # the pieces of a chunk stand in order
    return tuple(column[order] for column in columns)


def _nbytes(kinds: Sequence[Kind], kind: np.ndarray, numel: np.ndarray) -> np.ndarray:
    """Bytes of the payload of each row; few sizes differ."""
    found = np.zeros_like(numel)
    for number, (codec, dtype) in enumerate(kinds):
        of_kind = (kind == number).nonzero()[0]
        values, place = np.unique(numel[of_kind], return_inverse=True)
        lay = layout(codec, dtype)
        found[of_kind] = np.array([lay.nbytes(n) for n in values.tolist()], dtype="i8")[place]
    return found
