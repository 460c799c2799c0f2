"""SRA's graphs over all ranks: every send has its receive; the formula counts the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from symbolic import Rank, key_of
from test_graphs import bytes_sent

from gradwire.algorithms import scatter_reduce_allgather as sra
from gradwire.engine import Kind
from ranks import WORLD_SIZES

sizes_of = st.integers(1, 9).flatmap(
    lambda n: st.lists(
        st.lists(st.sampled_from([0, 16, 160]), min_size=n, max_size=n), min_size=1, max_size=4
    )
)


@given(sizes_of)
def test_sends_and_receives_match(sizes: list[list[int]]) -> None:
    n = len(sizes[0])
    ranks = [Rank(rank, sra.build(rank, n, sizes), []) for rank in range(n)]
    sent, received = (
        {key_of(r, t) for r in ranks for t, found in enumerate(r.graph.kind) if found is kind}
        for kind in (Kind.SEND, Kind.RECV)
    )
    assert sent == received


@given(sizes_of)
def test_the_formula_counts_what_the_graph_sends(sizes: list[list[int]]) -> None:
    n = len(sizes[0])
    for rank in range(n):
        graph = sra.build(rank, n, sizes)
        assert sra.wire_bytes(rank, n, sizes) == bytes_sent(graph, sizes)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_each_value_is_merged_once_and_decoded_by_the_others(world_size: int) -> None:
    sizes = [[16] * world_size] * 3
    for rank in range(world_size):
        kinds = sra.build(rank, world_size, sizes).kind
        alone = world_size == 1
        assert kinds.count(Kind.MERGE) == (0 if alone else 3)
        assert kinds.count(Kind.DECODE) == 3 * (world_size - 1)
        assert kinds.count(Kind.ENCODE) == (0 if alone else 3)


def test_expected_time_is_latency_plus_bytes() -> None:
    assert sra.seconds(4, 1e6, alpha=1e-3, beta=8e-9) == pytest.approx(2e-3 + 1.5 * 1e6 * 8e-9)
