"""Slots: the numbers of messages are equal at both ends, and unique per link."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from symbolic import Rank, key_of
from test_graphs import draw_sizes
from test_schedules import ALGORITHMS, even_sizes, uncompressed

from gradwire.algorithms import Algorithm
from gradwire.engine import Kind

quickly = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


def check(algorithm: Algorithm, n: int, sizes: list[list[int]]) -> None:
    ranks = [Rank(r, algorithm.build(r, n, sizes), []) for r in range(n)]
    sent, received = (
        {
            key_of(rank, task): rank.graph.slot[task]
            for rank in ranks
            for task, found in enumerate(rank.graph.kind)
            if found is kind
        }
        for kind in (Kind.SEND, Kind.RECV)
    )
    assert sent == received
    links: dict[tuple[int, int], list[int]] = {}
    for (sender, receiver, *_), slot in sent.items():
        links.setdefault((sender, receiver), []).append(slot)
    for slots in links.values():
        assert sorted(slots) == list(range(len(slots)))
    for rank in ranks:
        own = [slots for ends, slots in links.items() if rank.number in ends]
        assert rank.graph.slots == max(map(len, own), default=0)
        kernels = [t for t, peer in enumerate(rank.graph.peer) if peer < 0]
        assert all(rank.graph.slot[task] == -1 for task in kernels)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_both_ends_count_alike(name: str) -> None:
    for n, segments in product(range(1, 10), (1, 2, 5)):
        algorithm = ALGORITHMS[name](n)
        check(algorithm, n, even_sizes(algorithm, n, segments))


@pytest.mark.parametrize("name", ALGORITHMS)
@quickly
@given(n=st.integers(1, 9), data=st.data())
def test_what_is_empty_has_no_slot(name: str, n: int, data: st.DataObject) -> None:
    algorithm = ALGORITHMS[name](n)
    sizes = draw_sizes(data, algorithm.chunks(n))
    check(algorithm, n, [uncompressed(algorithm, segment) for segment in sizes])
