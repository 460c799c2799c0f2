"""Agreement between ranks."""

from __future__ import annotations

from gradwire.engine import Communicator
from gradwire.errors import ConfigError
from ranks import as_threads, caught


def test_ranks_agree_or_each_is_told_the_first_difference() -> None:
    def body(comm: Communicator) -> tuple[int, BaseException | None]:
        digest = comm.agree("a plan", ["w: 4 bits", "b: dense"])
        bits = 2 if comm.rank == 2 else 4
        other = caught(lambda: comm.agree("a plan", ["a: dense", f"w: {bits} bits", "b: dense"]))
        return digest, other

    found = as_threads(3, body)
    assert len({digest for digest, _ in found}) == 1
    for rank, (_, error) in enumerate(found):
        assert isinstance(error, ConfigError)
        assert "w: 4 bits" in str(error)
        assert "w: 2 bits" in str(error)
        others = (2,) if rank < 2 else (0, 1)
        assert any(f"rank {other} has" in str(error) for other in others)


def test_a_longer_plan_differs_in_its_first_extra_line() -> None:
    def body(comm: Communicator) -> BaseException | None:
        return caught(lambda: comm.agree("a plan", ["a"] + ["b"] * comm.rank))

    for error in as_threads(2, body):
        assert isinstance(error, ConfigError)
        assert "(nothing)" in str(error)
