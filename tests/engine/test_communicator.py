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
