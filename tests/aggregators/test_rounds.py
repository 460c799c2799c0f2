"""Aggregators and the rounds that drive them."""

from __future__ import annotations

import threading

import pytest
import torch

from gradwire import QSGD, ConfigError, Identity, Options
from gradwire.aggregators import (
    Aggregator,
    Attached,
    Compressed,
    CompressedAllReduce,
    Dense,
    ErrorFeedback,
    Rounds,
    Steps,
)
from gradwire.engine import Communicator, Outcome
from gradwire.lang import rng
from ranks import as_threads


class Twice:
    """The average of the first half, then of the second: two rounds, no state."""

    def aggregate(self, gradient: torch.Tensor) -> Steps:
        half = gradient.numel() // 2
        yield CompressedAllReduce(gradient[:half].clone(), Identity())
        first = yield CompressedAllReduce(gradient[:half], Identity())
        second = yield CompressedAllReduce(gradient[half:], Identity())
        return torch.cat([first, second])

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        assert not state


class Silent(Compressed):
    """Sends nothing: every rank takes zeros."""

    def __init__(self) -> None:
        super().__init__(Identity())

    def aggregate(self, gradient: torch.Tensor) -> Steps:
        yield from ()
        return torch.zeros_like(gradient)


def average(
    comm: Communicator, aggregators: list[Aggregator], gradients: list[torch.Tensor]
) -> list[Outcome]:
    """One bucket's rounds, awaited."""
    members = [
        Attached(f"p{i}", a, rng.parameter_keys(0, f"p{i}", comm.rank), rotation=i)
        for i, a in enumerate(aggregators)
    ]
    ended = threading.Event()
    result: list[Outcome] = []
    errors: list[BaseException] = []

    def done(error: BaseException | None, outcomes: list[Outcome]) -> None:
        result.extend(outcomes)
        if error is not None:
            errors.append(error)
        ended.set()

    Rounds(comm.owner("a test"), members, gradients, Options(), done).start()
    assert ended.wait(30)
    if errors:
        raise errors[0]
    return result


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rounds_of_all_lengths_share_collectives(world_size: int) -> None:
    data = [[torch.randn(500) for _ in range(4)] for _ in range(world_size)]

    def body(comm: Communicator) -> tuple[list[torch.Tensor], int]:
        mine = [t.clone() for t in data[comm.rank]]
        outcomes = average(comm, [Dense(), Twice(), Silent(), Twice()], mine)
        return mine, len(outcomes)

    for mine, rounds in as_threads(world_size, body):
        assert rounds == 3  # the longest has three; shorter ones travel in the first ones' messages
        for i in (0, 1, 3):
            expected = torch.stack([rank[i] for rank in data]).mean(0)
            torch.testing.assert_close(mine[i], expected)
        assert not mine[2].any()


def test_nothing_to_send_ends_at_once() -> None:
    def body(comm: Communicator) -> int:
        return len(average(comm, [Silent()], [torch.ones(5)]))

    assert as_threads(2, body) == [0, 0]


def test_error_feedback_converges_where_two_bits_alone_do_not() -> None:
    """The mean of many averages of one gradient is that gradient, with error feedback."""
    data = [torch.randn(1000) for _ in range(2)]
    codec = QSGD(bits=2, block=1000, scale="max", rounding="nearest")

    def body(comm: Communicator) -> list[torch.Tensor]:
        means = []
        for aggregator in (Compressed(codec), ErrorFeedback(Compressed(codec))):
            total = torch.zeros(1000)
            for _ in range(100):
                gradient = data[comm.rank].clone()
                average(comm, [aggregator], [gradient])
                total += gradient
            means.append(total / 100)
        return means

    plain, fed_back = as_threads(2, body)[0]
    expected = torch.stack(data).mean(0)
    assert (fed_back - expected).norm() < 0.1 * (plain - expected).norm()


def test_error_feedback_state_survives() -> None:
    saved = ErrorFeedback(Compressed(QSGD()))
    assert saved.state_dict() == {}
    saved.residual = torch.randn(10)
    loaded = ErrorFeedback(Compressed(QSGD()))
    loaded.load_state_dict(saved.state_dict())
    assert loaded.residual is not None
    assert torch.equal(loaded.residual, saved.residual)
    assert loaded.residual.data_ptr() != saved.residual.data_ptr()


@pytest.mark.parametrize(
    "residual",
    [
        torch.zeros(10, dtype=torch.float64),
        torch.zeros(2, 5),
        torch.zeros(20)[::2],
        torch.zeros(10, device="meta"),
    ],
)
def test_only_a_residual_that_kernels_can_address_is_taken(residual: torch.Tensor) -> None:
    kept = ErrorFeedback(Compressed(QSGD()))
    kept.residual = torch.ones(10)
    with pytest.raises(ConfigError, match="fp32, 1-D, contiguous and in memory"):
        kept.load_state_dict({"residual": residual})
    assert torch.equal(kept.residual, torch.ones(10))


def test_a_state_without_an_owner_is_refused() -> None:
    with pytest.raises(ConfigError, match="no state"):
        Compressed(QSGD()).load_state_dict({"residual": torch.zeros(3)})


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_dense_averages_in_its_dtype(dtype: torch.dtype | None) -> None:
    data = [torch.randn(300) for _ in range(3)]

    def body(comm: Communicator) -> torch.Tensor:
        mine = data[comm.rank].clone()
        average(comm, [Dense(dtype)], [mine])
        return mine

    expected = torch.stack(data).mean(0)
    tolerance = 1e-6 if dtype is None else 2 * torch.finfo(dtype).eps
    for found in as_threads(3, body):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_dense_refuses_other_dtypes() -> None:
    with pytest.raises(ConfigError, match="float64"):
        Dense(torch.float64)
