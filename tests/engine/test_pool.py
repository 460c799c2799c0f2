"""Memory of collectives: reused where it fits, and dropped where it would accumulate."""

from __future__ import annotations

import pytest
import torch

from gradwire.engine import Pool


@pytest.fixture
def pool() -> Pool:
    return Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))


# Arenas that are in flight together, one time after another; and the most memory that is owned.
SIZES: dict[str, tuple[list[list[int]], int]] = {
    "memory is reused": ([[1000], [900]], 1000),
    "a large bucket's is let go before more is taken": (
        [[1000], *[[400, 400]] * 3],
        1000,
    ),
    "a small bucket does not hold a large one's": ([[70, 1000]] * 10, 1070),
    "two in flight own two": ([[100, 100]], 200),
}


@pytest.mark.parametrize("what", SIZES)
def test_what_fits_is_reused_and_nothing_accumulates(what: str, pool: Pool) -> None:
    steps, most = SIZES[what]
    for sizes in steps:
        for arena in [pool.take(nbytes) for nbytes in sizes]:
            pool.give(arena)
    assert pool.peak_bytes == most


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
