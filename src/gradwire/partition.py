"""How tensors are cut for a collective: rows, chunks, segments, and their offsets in messages.

A *row* is a contiguous piece of one tensor, the unit of a kernel's table. A tensor of n values in
blocks of B is cut into as many chunks of whole blocks as the algorithm needs. Its k-th piece goes
to chunk (k + rotation) mod chunks, which balances the remainders of many small tensors. The cut
depends on nothing else, in particular not on DDP's buckets, so a tensor's result does not depend on
the tensors it is sent with (law 8). With `shards`, chunk k is the shard of rank k, of any length;
there may be gaps between shards in memory.

With `plain`, every chunk k appears a second time, uncompressed, as chunk k + chunks: an algorithm
may then send either form.

Segments cut each chunk's rows again, at block boundaries, to pipeline. The rows of a tensor-scope
codec are never cut, since that would change their payload. Within a message, rows are in the order
of their tensors, each at a multiple of 16 bytes after the header.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from gradwire.codecs import Identity
from gradwire.engine.message import align
from gradwire.errors import ConfigError
from gradwire.lang import Codec, Exact, layout

SEGMENT_BYTES = 4 << 20  # large enough to amortise a kernel call and a message
_MAX_SEGMENTS = 16

Kind = tuple[Codec, torch.dtype]  # what a payload's layout depends on


@dataclass(frozen=True)
class Spec:
    """One tensor of a collective; the same on all ranks.

    Attributes:
        name: of the parameter, for errors.
        numel: number of values.
        dtype: fp32, fp16 or bf16; any dtype with the codec `Exact`.
        codec: encodes its payloads.
        feedback: whether it has a residual (error feedback).
        rotation: its k-th piece belongs to chunk (k + rotation) mod chunks.
        lengths: for shards, the number of values per rank; (): equal shards.
        stride: for shards, the number of values from the start of one shard to the start of the
            next; 0: contiguous shards.
    """

    name: str
    numel: int
    dtype: torch.dtype
    codec: Codec
    feedback: bool = False
    rotation: int = 0
    lengths: tuple[int, ...] = ()
    stride: int = 0

    def __hash__(self) -> int:
        """Cached, since collectives are looked up by their specs in every step."""
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            what = (self.name, self.numel, self.dtype, self.codec, self.feedback)
            known = hash((*what, self.lengths, self.stride))
            object.__setattr__(self, "_hash", known)
        return known

    def __str__(self) -> str:
        ending = ", error feedback" if self.feedback else ""
        if self.lengths:
            ending += f", shards of {self.lengths}"
        if self.stride:
            ending += f", stride {self.stride}"
        what = f"{self.numel} x {self.dtype}, {self.codec}{ending}"
        return f"{self.name}: {what}, rotation {self.rotation}"

    def shard_lengths(self, ranks: int) -> tuple[int, ...]:
        """The number of values of each rank's shard.

        Raises:
            ConfigError: the tensor cannot be cut into these shards.
        """
        lengths = self.lengths or (self.numel // ranks,) * ranks
        if len(lengths) != ranks or sum(lengths) != self.numel or min(lengths) < 0:
            what = f"shards of {lengths}" if self.lengths else f"{ranks} shards"
            raise ConfigError(
                f"{self.name}: {self.numel} values cannot be cut into {what}: give lengths= for "
                f"each of {ranks} ranks, {self.numel} in all"
            )
        if self.stride and self.stride < max(lengths):
            raise ConfigError(
                f"{self.name}: shards of {lengths} overlap at stride={self.stride}: give a "
                f"stride= of at least {max(lengths)}"
            )
        return lengths

    def shards(self, ranks: int) -> list[tuple[int, int, int]]:
        """(first value, number of values, offset in memory) of each rank's shard.

        Raises:
            ConfigError: as `shard_lengths`.
        """
        lengths = self.shard_lengths(ranks)
        first = [0, *accumulate(lengths)]
        at = [rank * self.stride for rank in range(ranks)] if self.stride else first
        return list(zip(first, lengths, at, strict=False))

    def extent(self, ranks: int) -> int:
        """The number of values that its memory spans, gaps between shards included."""
        if not self.stride:
            return self.numel
        _, length, at = self.shards(ranks)[-1]
        return at + length


def rotation(number: int, ranks: int) -> int:
    """The rotation of a module's parameter with this number.

    It balances remainders, also those of every second parameter (biases beside weights), and no
    parameter's chunks depend on another's codec.
    """
    return (number + number // ranks) % ranks


@dataclass(frozen=True)
class Partition:
    """Every row of a collective, as columns, and the payload bytes of each message.

    Rows are sorted by chunk, then segment, then tensor, so the rows of a message are contiguous.

    Attributes:
        chunks: number of chunks, of one form.
        kinds: (codec, dtype) of payloads, in order of first use.
        kind: per row, the index of its kind.
        item: per row, the index of its tensor.
        start, numel: per row, its first value in that tensor and its number of values.
        at: per row, its offset in the tensor's memory, in values; `start` unless shards have gaps.
        segment, chunk: per row, its message.
        offset: per row, of its payload in the message, in bytes, without the header.
        first: the rows of message (segment, chunk) begin at first[chunk * segments + segment] and
            end where the next message's begin.
        sizes: sizes[segment][chunk], in bytes.
    """

    chunks: int
    kinds: tuple[Kind, ...]
    kind: np.ndarray
    item: np.ndarray
    start: np.ndarray
    numel: np.ndarray
    at: np.ndarray
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
    """Cut the tensors of `specs`, in the same way on every rank.

    Args:
        chunks: number of chunks per segment.
        segments: number of pipeline units; None chooses it by size.
        plain: also add every chunk uncompressed.
        shards: chunk k is the shard of rank k; rotations are ignored.
        segment_bytes: if `segments` is None, the most uncompressed bytes of a chunk per segment, as
            long as 16 segments suffice.

    Raises:
        ConfigError: a tensor cannot be cut into shards.
    """
    start, numel, moved = _shards(specs, chunks) if shards else _cut(specs, chunks)
    if segments is None:
        itemsizes = np.array([spec.dtype.itemsize for spec in specs], dtype="i8")
        raw = int((numel * itemsizes).sum(axis=1).max())
        segments = min(max(-(-raw // segment_bytes), 1), _MAX_SEGMENTS)
    chunk, segment, item, start, numel = _pipeline(specs, start, numel, segments)
    at = start + moved[chunk, item]

    forms: list[list[Kind]] = [[(spec.codec, spec.dtype) for spec in specs]]
    if plain:
        forms.append([(_uncompressed(spec.codec), spec.dtype) for spec in specs])
    present = dict.fromkeys(item.tolist())
    kinds = tuple(dict.fromkeys(form[i] for form in forms for i in present))
    number = {kind: n for n, kind in enumerate(kinds)}
    numbers = [np.array([number.get(kind, -1) for kind in form], dtype="i8") for form in forms]
    kind = np.concatenate([of_item[item] for of_item in numbers])
    chunk = np.concatenate([chunk + chunks * n for n in range(len(forms))])
    rows_of = (segment, item, start, numel, at)
    segment, item, start, numel, at = (np.tile(column, len(forms)) for column in rows_of)

    rows = np.bincount(chunk * segments + segment, minlength=chunks * len(forms) * segments)
    first = np.concatenate([[0], rows.cumsum()])
    nbytes = np.zeros_like(numel)
    for n, (codec, dtype) in enumerate(kinds):
        nbytes[kind == n] = row_nbytes(layout(codec, dtype).nbytes, numel[kind == n])
    ends = np.concatenate([[0], align(nbytes).cumsum()])
    offset = ends[:-1] - np.repeat(ends[first[:-1]], rows)
    sizes = np.diff(ends[first]).reshape(-1, segments).T.tolist()
    columns = (kind, item, start, numel, at, segment, chunk, offset, first)
    return Partition(chunks, kinds, *columns, tuple(map(tuple, sizes)))


def _uncompressed(codec: Codec) -> Codec:
    return codec if isinstance(codec, Exact) else Identity()


def _cut(specs: Sequence[Spec], chunks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut tensors into whole blocks: int64[chunks, items] of each piece's first value, number of
    values, and offset in memory minus its first value."""
    block = np.array([layout(spec.codec, spec.dtype).block for spec in specs], dtype="i8")
    numel = np.array([spec.numel for spec in specs], dtype="i8")
    rotation = np.array([spec.rotation for spec in specs], dtype="i8")
    blocks = -(-numel // block)
    piece = (np.arange(chunks)[:, None] - rotation) % chunks
    begin, end = (np.minimum(k * blocks // chunks * block, numel) for k in (piece, piece + 1))
    return begin, end - begin, np.zeros_like(begin)


def _shards(specs: Sequence[Spec], ranks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `_cut`, into the shards of the ranks."""
    cut = np.array([spec.shards(ranks) for spec in specs], dtype="i8").reshape(-1, ranks, 3)
    first, length, at = cut.transpose(2, 1, 0)
    return first, length, at - first


def _pipeline(
    specs: Sequence[Spec], start: np.ndarray, numel: np.ndarray, segments: int
) -> tuple[np.ndarray, ...]:
    """Cut the pieces of each chunk into `segments` parts of about equal payload.

    Returns:
        Per row: chunk, segment, item, start, numel.
    """
    chunk, item = numel.nonzero()
    if segments == 1:
        return chunk, np.zeros_like(chunk), item, start[chunk, item], numel[chunk, item]
    nbytes = np.zeros_like(numel)
    for i, spec in enumerate(specs):
        nbytes[:, i] = row_nbytes(layout(spec.codec, spec.dtype).nbytes, numel[:, i])
    total = nbytes.sum(axis=1)
    done = np.zeros(len(numel))
    rows: list[tuple[np.ndarray, ...]] = []
    for i, spec in enumerate(specs):
        lay = layout(spec.codec, spec.dtype)
        chunk = numel[:, i].nonzero()[0]
        at, left = start[chunk, i], numel[chunk, i]
        per_value = nbytes[chunk, i] / left
        while len(chunk):  # one row per chunk whose piece is not used up
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
    order = columns[0].argsort(kind="stable")  # stable: keeps the pieces of a chunk in order
    return tuple(column[order] for column in columns)


def row_nbytes(nbytes: Callable[[int], int], numel: np.ndarray) -> np.ndarray:
    """Payload bytes per row. There are few different sizes, so each is computed once."""
    values, place = np.unique(numel, return_inverse=True)
    return np.array([nbytes(n) for n in values.tolist()], dtype="i8")[place]
