"""Agreement between ranks, and memory that does not pile up."""

from __future__ import annotations

import pytest

from gradwire.engine import Communicator
from gradwire.errors import ConfigError, TransportError
from gradwire.transport import Hub
from ranks import as_threads, caught


def test_ranks_that_agree_get_the_same_digest() -> None:
    digests = as_threads(3, lambda comm: comm.agree("a plan", ["w: 4 bits", "b: dense"]))
    assert len(set(digests)) == 1


def test_the_first_difference_is_named_on_every_rank() -> None:
    def body(comm: Communicator) -> BaseException | None:
        bits = 2 if comm.rank == 2 else 4
        return caught(lambda: comm.agree("a plan", ["a: dense", f"w: {bits} bits", "b: dense"]))

    for rank, error in enumerate(as_threads(3, body)):
        assert isinstance(error, ConfigError)
        other = 2 if rank < 2 else 0
        assert "w: 4 bits" in str(error)
        assert "w: 2 bits" in str(error)
        assert f"rank {other}" in str(error)


def test_a_longer_plan_differs_in_its_first_extra_line() -> None:
    def body(comm: Communicator) -> BaseException | None:
        return caught(lambda: comm.agree("a plan", ["a"] + ["b"] * comm.rank))

    for error in as_threads(2, body):
        assert isinstance(error, ConfigError)
        assert "(nothing)" in str(error)


def test_ranks_of_another_world_size_are_told() -> None:
    hub = Hub(3, timeout=1)

    def body(comm: Communicator) -> BaseException | None:
        if comm.rank == 0:
            comm.world_size = 2
        return caught(lambda: comm.agree("a plan", ["a"]))

    errors = as_threads(3, body, hub)
    assert all(isinstance(error, (ConfigError, TransportError)) for error in errors)
    assert "world size" in " ".join(map(str, errors))


def test_tags_in_flight_are_all_different_whatever_the_plans(comm: Communicator) -> None:
    seen: list[int] = []
    for plan in (0, 5, 5 + (1 << 9), 2**64 - 1):
        _, first = comm.sequence(plan, 64)
        seen += range(first, first + 64)
    assert len(set(seen)) == len(seen)


def test_tags_start_anew_before_they_run_out(comm: Communicator) -> None:
    tags = [comm.sequence(3, 100_000)[1] for _ in range(30)]
    assert max(tags) + 100_000 <= 4 << 20
    assert len(set(tags)) > 1
    with pytest.raises(ConfigError, match="fewer segments"):
        comm.sequence(3, 1 << 20)


@pytest.fixture
def comm() -> Communicator:
    return Communicator(Hub(1).transport(0))


def test_memory_is_reused(comm: Communicator) -> None:
    first = comm.take(1000)
    comm.give(first)
    assert comm.take(900).data_ptr() == first.data_ptr()
    assert comm.peak_bytes == 1000


def test_memory_of_one_large_bucket_is_let_go_before_the_next_is_taken(comm: Communicator) -> None:
    comm.give(comm.take(1000))
    for _ in range(3):
        arenas = [comm.take(400), comm.take(400)]
        for arena in arenas:
            comm.give(arena)
    assert comm.peak_bytes == 1000


def test_a_small_bucket_does_not_hold_a_large_ones_memory(comm: Communicator) -> None:
    for _ in range(10):
        held = [comm.take(70), comm.take(1000)]
        for arena in held:
            comm.give(arena)
    assert comm.peak_bytes == 1070


def test_buckets_of_mixed_sizes_settle_on_two_arenas(comm: Communicator) -> None:
    """As under DDP: a small first bucket, then large ones, two in flight."""
    addresses = set()
    for step in range(10):
        held = [comm.take(40)]
        for nbytes in (1000, 1000, 900):
            held.append(comm.take(nbytes))
            if step > 2:
                addresses.add(held[-1].data_ptr())
            comm.give(held.pop(0))
        comm.give(held.pop())
    assert comm.peak_bytes <= 2040
    assert len(addresses) == 2


def test_two_in_flight_own_two_arenas(comm: Communicator) -> None:
    arenas = [comm.take(100), comm.take(100)]
    assert comm.peak_bytes == 200
    for arena in arenas:
        comm.give(arena)
