"""Aggregators and the rounds that drive them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from gradwire import QSGD, ConfigError, Options
from gradwire.aggregators import (
    Aggregator,
    Attached,
    Compressed,
    Context,
    Dense,
    ErrorFeedback,
    Rounds,
    Steps,
)
from gradwire.collectives import AllReduce
from gradwire.engine import Communicator, Outcome
from gradwire.lang import rng
from ranks import as_threads


@dataclass(frozen=True)
class Twice(Aggregator):
    """The average of the first half, then of the second: three rounds, no state."""

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        halves = [c.gradient.numel() // 2 for c in contexts]
        pairs = list(zip(contexts, halves, strict=True))
        yield [AllReduce(c.gradient[:half].clone(), of=c) for c, half in pairs]
        first = yield [AllReduce(c.gradient[:half].clone(), of=c) for c, half in pairs]
        second = yield [AllReduce(c.gradient[half:].clone(), of=c) for c, half in pairs]
        return [torch.cat(parts) for parts in zip(first, second, strict=True)]


@dataclass(frozen=True)
class Silent(Aggregator):
    """Sends nothing: the average is zero."""

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        yield from ()
        return [torch.zeros_like(c.gradient) for c in contexts]


def members_of(comm: Communicator, aggregators: Sequence[Aggregator], numel: int) -> list[Attached]:
    return [
        Attached(f"p{i}", (numel,), a, rng.parameter_keys(0, f"p{i}", comm.rank), rotation=i)
        for i, a in enumerate(aggregators)
    ]


def average(
    comm: Communicator, members: Sequence[Attached], gradients: list[torch.Tensor]
) -> list[Outcome]:
    """Run one scope's rounds to their end."""
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
        members = members_of(comm, [Dense(), Twice(), Silent(), Twice()], 500)
        return mine, len(average(comm, members, mine))

    for mine, rounds in as_threads(world_size, body):
        if world_size == 1:
            assert rounds == 0  # with one rank, gradients are averages
            assert all(torch.equal(a, b) for a, b in zip(mine, data[0], strict=True))
            continue
        assert rounds == 3  # the longest has three; shorter ones share the first ones' messages
        for i in (0, 1, 3):
            expected = torch.stack([rank[i] for rank in data]).mean(0)
            torch.testing.assert_close(mine[i], expected)
        assert not mine[2].any()


def test_nothing_to_send_ends_at_once() -> None:
    def body(comm: Communicator) -> int:
        return len(average(comm, members_of(comm, [Silent()], 5), [torch.ones(5)]))

    assert as_threads(2, body) == [0, 0]


def test_error_feedback_converges_where_two_bits_alone_do_not() -> None:
    """With error feedback, the mean of many averages of one gradient is that gradient."""
    data = [torch.randn(1000) for _ in range(2)]
    codec = QSGD(bits=2, block=1000, scale="max", rounding="nearest")

    def body(comm: Communicator) -> list[torch.Tensor]:
        means = []
        for aggregator in (Compressed(codec), ErrorFeedback(Compressed(codec))):
            total = torch.zeros(1000)
            members = members_of(comm, [aggregator], 1000)
            for _ in range(100):
                gradient = data[comm.rank].clone()
                average(comm, members, [gradient])
                total += gradient
            means.append(total / 100)
        return means

    plain, fed_back = as_threads(2, body)[0]
    expected = torch.stack(data).mean(0)
    assert (fed_back - expected).norm() < 0.1 * (plain - expected).norm()


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_dense_averages_in_its_dtype(dtype: torch.dtype | None) -> None:
    data = [torch.randn(300) for _ in range(3)]

    def body(comm: Communicator) -> torch.Tensor:
        mine = data[comm.rank].clone()
        average(comm, members_of(comm, [Dense(dtype)], 300), [mine])
        return mine

    expected = torch.stack(data).mean(0)
    tolerance = 1e-6 if dtype is None else 2 * torch.finfo(dtype).eps
    for found in as_threads(3, body):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_dense_refuses_other_dtypes() -> None:
    with pytest.raises(ConfigError, match="float64"):
        Dense(torch.float64)
