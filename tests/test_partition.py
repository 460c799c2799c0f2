"""Partition: every value in one row, chunks by the rule alone, messages without overlap."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import QSGD, Codec
from gradwire.codecs import Identity, TernGrad, TopK
from gradwire.lang import layout
from gradwire.partition import SEGMENT_BYTES, Partition, Spec, partition
from rooms.engine import ALIGNMENT, align

# Cores are shared: no time is a failure. And each run has the same examples.
settings.register_profile("beside others", deadline=None, derandomize=True)
settings.load_profile("beside others")

CODECS: list[Codec] = [Identity(), QSGD(), QSGD(block=1024, bits=3), TernGrad(), TopK()]


class Row(NamedTuple):
    """A row of a partition's columns, with its codec and dtype."""

    item: int
    start: int
    numel: int
    segment: int
    chunk: int
    offset: int
    codec: Codec


def rows_of(cut: Partition) -> list[Row]:
    columns = cut.item, cut.start, cut.numel, cut.segment, cut.chunk, cut.offset
    codecs = [cut.kinds[kind][0] for kind in cut.kind]
    return [Row(*row) for row in zip(*(column.tolist() for column in columns), codecs, strict=True)]


# ---- the rule, row by row -----------------------------------------------------------------------


def by_the_rule(
    specs: list[Spec], chunks: int, segments: int | None, plain: bool, shards: bool, most: int
) -> tuple[list[Row], list[list[int]]]:
    """The rule of gradwire.partition in plain Python: (rows, sizes[segment][chunk])."""
    shares: list[list[tuple[int, int, int]]] = [[] for _ in range(chunks)]
    for item, spec in enumerate(specs):
        block = spec.numel // chunks if shards else layout(spec.codec, spec.dtype).block
        blocks = chunks if shards else -(-spec.numel // block)
        ends = [min(k * blocks // chunks * block, spec.numel) for k in range(chunks + 1)]
        for k, (first, last) in enumerate(pairwise(ends)):
            if last > first:
                chunk = k if shards else (k + spec.rotation) % chunks
                shares[chunk].append((item, first, last - first))
    if segments is None:
        raw = max(sum(n * specs[i].dtype.itemsize for i, _, n in share) for share in shares)
        segments = min(max(-(-raw // most), 1), 16)
    rows: list[Row] = []
    sizes = [[0] * chunks * (1 + plain) for _ in range(segments)]
    for whole in (False, True) if plain else (False,):
        for chunk, share in enumerate(shares):
            for segment, (item, start, numel) in in_segments(specs, share, segments):
                codec, column = specs[item].codec, chunk
                if whole:
                    codec, column = Identity(), chunk + chunks
                offset = sizes[segment][column]
                rows.append(Row(item, start, numel, segment, column, offset, codec))
                sizes[segment][column] += align(layout(codec, specs[item].dtype).nbytes(numel))
    return rows, sizes


def in_segments(
    specs: list[Spec], share: list[tuple[int, int, int]], segments: int
) -> list[tuple[int, tuple[int, int, int]]]:
    """A row goes to the segment that its first payload byte is in, were all segments of one size;
    if it can be cut, it ends with the first block at or behind the segment's end."""
    layouts = [layout(specs[item].codec, specs[item].dtype) for item, _, _ in share]
    nbytes = [lay.nbytes(numel) for lay, (_, _, numel) in zip(layouts, share, strict=True)]
    pieces: list[tuple[int, tuple[int, int, int]]] = []
    done = 0.0
    for lay, size, (item, start, left) in zip(layouts, nbytes, share, strict=True):
        per_value = size / left
        while left:
            segment = min(int(done * segments / sum(nbytes)), segments - 1)
            take = left
            if lay.splittable and segment < segments - 1:
                room = (sum(nbytes) * (segment + 1) / segments - done) / per_value
                take = min(max(-(-int(room) // lay.block), 1) * lay.block, left)
            pieces.append((segment, (item, start, take)))
            start, left, done = start + take, left - take, done + take * per_value
    return pieces


specs_of = st.lists(
    st.builds(
        lambda numel, dtype, codec, rotation: Spec("w", numel, dtype, codec, rotation=rotation),
        st.one_of(st.integers(0, 300), st.integers(0, 5000), st.integers(0, 300_000)),
        st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
        st.sampled_from(CODECS),
        st.integers(0, 20),
    ),
    max_size=8,
)


@settings(max_examples=250)
@given(
    specs_of,
    st.integers(1, 12),
    st.sampled_from([None, 1, 2, 3, 4, 5, 16]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1 << 10, 1 << 16, SEGMENT_BYTES]),
)
def test_rows_are_those_of_the_rule(
    specs: list[Spec], n: int, segments: int | None, plain: bool, shards: bool, most: int
) -> None:
    """And so every value is in one row, messages hold theirs without overlap, and shards are of
    equal size; where chunks stand there uncompressed too, the others are as without."""
    if shards:
        specs = [replace(spec, numel=spec.numel // n * n) for spec in specs]
    cut = partition(specs, n, segments, plain, shards, most)
    rows, sizes = by_the_rule(specs, n, segments, plain, shards, most)
    assert rows_of(cut) == rows
    assert cut.sizes == tuple(map(tuple, sizes))
    # Kinds have the order of their first rows; and a message's rows are consecutive.
    kinds = [(row.codec, specs[row.item].dtype) for row in rows]
    assert cut.kinds == tuple(dict.fromkeys(kinds))
    assert [cut.kinds[kind] for kind in cut.kind] == kinds
    for message, (first, last) in enumerate(pairwise(cut.first.tolist())):
        chunk, segment = divmod(message, len(sizes))
        assert [i for i, r in enumerate(rows) if (r.chunk, r.segment) == (chunk, segment)] == list(
            range(first, last)
        )
    encoded, whole = ([r for r in rows if (r.chunk < n) == early] for early in (True, False))
    check_rows(encoded, specs, n, shards)
    check_messages(rows, specs, sizes)
    if not shards:  # owners follow from the tensor alone: segments and others do not change them
        owners = chunk_of(encoded)
        assert owners == chunk_of(rows_of(partition(specs, n, 1)))
        for item, spec in enumerate(specs):
            alone = chunk_of(rows_of(partition([spec], n, 1)))
            assert [*alone.values()] == [c for (of, _), c in owners.items() if of == item]
    if plain:
        without = partition(specs, n, segments, False, shards, most)
        assert encoded == rows_of(without)
        assert [segment[:n] for segment in cut.sizes] == [*without.sizes]
        for form, row in zip(whole, encoded, strict=True):
            assert form == row._replace(chunk=row.chunk + n, offset=form.offset, codec=Identity())
        for segment in sizes:
            assert [size > 0 for size in segment[n:]] == [size > 0 for size in segment[:n]]


def check_rows(rows: list[Row], specs: list[Spec], n: int, shards: bool) -> None:
    """Every value is in one row, which begins with a block; or is in its shard."""
    for item, spec in enumerate(specs):
        mine = sorted((r for r in rows if r.item == item), key=lambda r: r.start)
        ends = [0, *(r.start + r.numel for r in mine)]
        assert [*(r.start for r in mine), spec.numel] == ends
        assert all(r.numel > 0 for r in mine)
        if shards:
            of = spec.numel // n
            assert all(of * r.chunk <= r.start and r.start + r.numel <= of * (r.chunk + 1)
                       for r in mine)  # fmt: skip
        else:
            assert all(r.start % layout(spec.codec, spec.dtype).block == 0 for r in mine)


def check_messages(rows: list[Row], specs: list[Spec], sizes: list[list[int]]) -> None:
    ends: dict[tuple[int, int], int] = {}
    for row in sorted(rows, key=lambda r: (r.segment, r.chunk, r.offset)):
        message = (row.segment, row.chunk)
        assert row.offset % ALIGNMENT == 0
        assert row.offset >= ends.get(message, 0)
        ends[message] = row.offset + layout(row.codec, specs[row.item].dtype).nbytes(row.numel)
        assert ends[message] <= sizes[row.segment][row.chunk]


def chunk_of(rows: list[Row]) -> dict[tuple[int, int], int]:
    """(item, value) -> chunk, for the first value of every block of 128, in order."""
    found = {
        (row.item, value): row.chunk
        for row in rows
        for value in range(row.start, row.start + row.numel, 128)
    }
    return dict(sorted(found.items()))


def test_segments_are_balanced_small_tensors_spread_and_rows_of_tensor_scope_are_whole() -> None:
    cut = partition([Spec("w", 25_000_000, torch.float32, QSGD())], 4)
    sizes = [size for segment in cut.sizes for size in segment]
    assert len(cut.sizes) > 4
    assert max(sizes) < 1.05 * min(sizes)
    specs = [Spec("b", 700, torch.float32, Identity(), rotation=i % 4) for i in range(100)]
    (spread,) = partition(specs, 4, 1).sizes
    assert max(spread) < 1.2 * min(spread)
    assert len(partition([Spec("w", 400_000, torch.float32, TernGrad())], 4, 8).item) == 4
