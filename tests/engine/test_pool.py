"""Memory of collectives: reused where it fits, and dropped where it would accumulate."""

from __future__ import annotations

import pytest
import torch

from gradwire.engine import Pool


@pytest.fixture
def pool() -> Pool:
    return Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))


def test_memory_is_reused(pool: Pool) -> None:
    first = pool.take(1000)
    pool.give(first)
    assert pool.take(900).data_ptr() == first.data_ptr()
    assert pool.peak_bytes == 1000


def test_memory_of_one_large_bucket_is_let_go_before_the_next_is_taken(pool: Pool) -> None:
    pool.give(pool.take(1000))
    for _ in range(3):
        arenas = [pool.take(400), pool.take(400)]
        for arena in arenas:
            pool.give(arena)
    assert pool.peak_bytes == 1000


def test_a_small_bucket_does_not_hold_a_large_ones_memory(pool: Pool) -> None:
    for _ in range(10):
        held = [pool.take(70), pool.take(1000)]
        for arena in held:
            pool.give(arena)
    assert pool.peak_bytes == 1070


def test_buckets_of_mixed_sizes_settle_on_two_arenas(pool: Pool) -> None:
    """As under DDP: a small first bucket, then large ones, two in flight."""
    addresses = set()
    for step in range(10):
        held = [pool.take(40)]
        for nbytes in (1000, 1000, 900):
            held.append(pool.take(nbytes))
            if step > 2:
                addresses.add(held[-1].data_ptr())
            pool.give(held.pop(0))
        pool.give(held.pop())
    assert pool.peak_bytes <= 2040
    assert len(addresses) == 2


def test_two_in_flight_own_two_arenas(pool: Pool) -> None:
    arenas = [pool.take(100), pool.take(100)]
    assert pool.peak_bytes == 200
    for arena in arenas:
        pool.give(arena)
