"""Agreement between ranks."""

from __future__ import annotations

from gradwire.engine import Communicator
from gradwire.errors import ConfigError
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
