"""Partition: every value in one row, chunks by the rule alone, messages without overlap."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import QSGD, Codec, ConfigError, Identity, TernGrad
from gradwire.codecs import TopK
from gradwire.lang import layout
from gradwire.partition import SEGMENT_BYTES, Partition, Spec, partition
from rooms.engine import ALIGNMENT, align

# Cores are shared: no time is a failure. And each run has the same examples.
settings.register_profile("beside others", deadline=None, derandomize=True)
settings.load_profile("beside others")

CODECS: list[Codec] = [Identity(), QSGD(), QSGD(block=1024, bits=3), TernGrad(), TopK()]

specs_of = st.lists(
    st.builds(
        lambda numel, codec, rotation: Spec("w", numel, torch.float32, codec, rotation=rotation),
        st.integers(0, 5000),
        st.sampled_from(CODECS),
        st.integers(0, 20),
    ),
    max_size=6,
)
worlds = st.integers(1, 9)


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


any_specs = st.lists(
    st.builds(
        lambda numel, dtype, codec, rotation: Spec("w", numel, dtype, codec, rotation=rotation),
        st.one_of(st.integers(0, 300), st.integers(0, 300_000)),
        st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
        st.sampled_from(CODECS),
        st.integers(0, 20),
    ),
    max_size=8,
)


@given(
    any_specs,
    st.integers(1, 12),
    st.sampled_from([None, 1, 2, 3, 16]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1 << 10, 1 << 16, SEGMENT_BYTES]),
)
def test_rows_are_those_of_the_rule(
    specs: list[Spec], n: int, segments: int | None, plain: bool, shards: bool, most: int
) -> None:
    if shards:
        specs = [replace(spec, numel=spec.numel // n * n) for spec in specs]
    cut = partition(specs, n, segments, plain, shards, most)
    rows, sizes = by_the_rule(specs, n, segments, plain, shards, most)
    found = rows_of(cut)
    assert found == rows
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


# ---- consequences -------------------------------------------------------------------------------


def chunk_of(cut: Partition) -> dict[tuple[int, int], int]:
    """(item, value) -> chunk, for the first value of every block of 128."""
    return {
        (row.item, value): row.chunk
        for row in rows_of(cut)
        for value in range(row.start, row.start + row.numel, 128)
    }


@given(specs_of, worlds, st.sampled_from([None, 1, 2, 5]))
def test_every_value_is_in_one_row_of_a_message(
    specs: list[Spec], n: int, segments: int | None
) -> None:
    """Rows start at blocks; messages hold theirs without overlap; owners follow from the tensor
    alone: neither the segments nor other tensors change them."""
    cut = partition(specs, n, segments)
    covered = [torch.zeros(spec.numel, dtype=torch.int32) for spec in specs]
    ends: dict[tuple[int, int], int] = {}
    for row in sorted(rows_of(cut), key=lambda r: (r.segment, r.chunk, r.offset)):
        lay = layout(specs[row.item].codec, torch.float32)
        covered[row.item][row.start : row.start + row.numel] += 1
        assert row.numel > 0
        assert row.start % lay.block == 0
        assert row.offset % ALIGNMENT == 0
        message = (row.segment, row.chunk)
        assert row.offset >= ends.get(message, 0)
        ends[message] = row.offset + lay.nbytes(row.numel)
        assert ends[message] <= cut.sizes[row.segment][row.chunk]
    assert all(bool((c == 1).all()) for c in covered)
    owners = chunk_of(cut)
    assert owners == chunk_of(partition(specs, n, 1))
    for item, spec in enumerate(specs):
        alone = {(item, v): c for (_, v), c in chunk_of(partition([spec], n, 1)).items()}
        assert alone == {k: c for k, c in owners.items() if k[0] == item}


def test_tensor_scope_rows_are_not_cut() -> None:
    spec = Spec("w", 400_000, torch.float32, TernGrad())
    assert len(partition([spec], 4, 8).item) == 4


def test_segments_are_balanced() -> None:
    spec = Spec("w", 25_000_000, torch.float32, QSGD())
    cut = partition([spec], 4)
    sizes = [size for segment in cut.sizes for size in segment]
    assert len(cut.sizes) > 4
    assert max(sizes) < 1.05 * min(sizes)


def test_many_small_tensors_spread_over_the_ranks() -> None:
    specs = [Spec("b", 700, torch.float32, Identity(), rotation=i % 4) for i in range(100)]
    (sizes,) = partition(specs, 4, 1).sizes
    assert max(sizes) < 1.2 * min(sizes)


@given(specs_of, worlds, st.sampled_from([None, 1, 3]))
def test_every_chunk_stands_there_uncompressed_too(
    specs: list[Spec], n: int, segments: int | None
) -> None:
    cut, both = partition(specs, n, segments), partition(specs, n, segments, plain=True)
    encoded, forms = rows_of(cut), rows_of(both)
    assert forms[: len(encoded)] == encoded
    for row, plain in zip(encoded, forms[len(encoded) :], strict=True):
        assert plain.codec == Identity()
        assert (plain.item, plain.start, plain.numel) == (row.item, row.start, row.numel)
        assert (plain.segment, plain.chunk) == (row.segment, row.chunk + n)
        assert plain.offset % ALIGNMENT == 0
        assert plain.offset + 4 * plain.numel <= both.sizes[plain.segment][plain.chunk]
    for compressed, segment in zip(cut.sizes, both.sizes, strict=True):
        assert segment[:n] == compressed
        assert [size > 0 for size in segment[n:]] == [size > 0 for size in compressed]


@given(st.integers(0, 3000), worlds, st.sampled_from(CODECS), st.sampled_from([None, 1, 4]))
def test_shards_are_of_equal_size(shard: int, n: int, codec: Codec, segments: int | None) -> None:
    spec = Spec("w", n * shard, torch.float32, codec, rotation=1)
    found = [0] * n
    for row in rows_of(partition([spec], n, segments, shards=True)):
        assert shard * row.chunk <= row.start
        assert row.start + row.numel <= shard * (row.chunk + 1)
        found[row.chunk] += row.numel
    assert found == [shard] * n


def test_what_cannot_be_cut_into_shards_is_named() -> None:
    with pytest.raises(ConfigError, match="w: 10 values cannot be cut into 3 shards"):
        partition([Spec("w", 10, torch.float32, QSGD())], 3, shards=True)
