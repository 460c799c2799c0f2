"""Partition: every value in one row, chunks by the rule alone, messages without overlap."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire import QSGD, Codec, ConfigError, Identity, TernGrad
from gradwire.engine.message import ALIGNMENT
from gradwire.lang import layout
from gradwire.partition import Partition, Spec, partition

CODECS: list[Codec] = [Identity(), QSGD(), QSGD(block=1024, bits=3), TernGrad()]

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


def chunk_of(cut: Partition) -> dict[tuple[int, int], int]:
    """(item, value) -> chunk, for the first value of every block of 128."""
    return {
        (row.item, value): row.chunk
        for row in cut.rows
        for value in range(row.start, row.start + row.numel, 128)
    }


@given(specs_of, worlds, st.sampled_from([None, 1, 2, 5]))
def test_every_value_is_in_one_row(specs: list[Spec], n: int, segments: int | None) -> None:
    covered = [torch.zeros(spec.numel, dtype=torch.int32) for spec in specs]
    for row in partition(specs, n, segments).rows:
        assert row.numel > 0
        covered[row.item][row.start : row.start + row.numel] += 1
    assert all(bool((c == 1).all()) for c in covered)


@given(specs_of, worlds, st.sampled_from([None, 1, 2, 5]))
def test_rows_start_at_blocks_and_messages_hold_them(
    specs: list[Spec], n: int, segments: int | None
) -> None:
    cut = partition(specs, n, segments)
    ends = {}
    for row in sorted(cut.rows, key=lambda r: (r.segment, r.chunk, r.offset)):
        lay = layout(specs[row.item].codec, torch.float32)
        assert row.start % lay.block == 0
        assert row.offset % ALIGNMENT == 0
        message = (row.segment, row.chunk)
        assert row.offset >= ends.get(message, 0)
        ends[message] = row.offset + lay.nbytes(row.numel)
        assert ends[message] <= cut.sizes[row.segment][row.chunk]


@given(specs_of, worlds, st.integers(1, 6))
def test_segments_leave_owners_alone(specs: list[Spec], n: int, segments: int) -> None:
    assert chunk_of(partition(specs, n, segments)) == chunk_of(partition(specs, n, 1))


@given(specs_of, worlds)
def test_company_leaves_owners_alone(specs: list[Spec], n: int) -> None:
    together = partition(specs, n, 1)
    for item, spec in enumerate(specs):
        alone = {(item, v): c for (_, v), c in chunk_of(partition([spec], n, 1)).items()}
        assert alone == {k: c for k, c in chunk_of(together).items() if k[0] == item}


def test_tensor_scope_rows_are_not_cut() -> None:
    spec = Spec("w", 400_000, torch.float32, TernGrad())
    assert len(partition([spec], 4, 8).rows) == 4


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
    assert both.rows[: len(cut.rows)] == cut.rows
    for row, plain in zip(cut.rows, both.rows[len(cut.rows) :], strict=True):
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
    for row in partition([spec], n, segments, shards=True).rows:
        assert shard * row.chunk <= row.start
        assert row.start + row.numel <= shard * (row.chunk + 1)
        found[row.chunk] += row.numel
    assert found == [shard] * n


def test_what_cannot_be_cut_into_shards_is_named() -> None:
    with pytest.raises(ConfigError, match="w: 10 values cannot be cut into 3 shards"):
        partition([Spec("w", 10, torch.float32, QSGD())], 3, shards=True)
