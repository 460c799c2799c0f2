"""Aggregators and the rounds that drive them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from averaging import Parameters, Shape, averaged, drawn, sent_bytes
from gradwire import QSGD
from gradwire.aggregators import Aggregator, Compressed, Context, Dense, ErrorFeedback, Steps
from gradwire.collectives import AllReduce
from gradwire.engine import Communicator
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


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rounds_of_all_lengths_share_collectives(world_size: int) -> None:
    shapes: list[Shape] = [(500,)] * 4
    data = [drawn(shapes, rank, 0) for rank in range(world_size)]

    def body(comm: Communicator) -> tuple[list[torch.Tensor], int]:
        mine = Parameters(comm, shapes, [Dense(), Twice(), Silent(), Twice()])
        return mine.average(data[comm.rank]), len(mine.outcomes[0])

    for found, rounds in as_threads(world_size, body):
        if world_size == 1:
            assert rounds == 0  # with one rank, gradients are averages
            assert all(map(torch.equal, found, data[0]))
            continue
        assert rounds == 3  # the longest has three; shorter ones share the first ones' messages
        for i in (0, 1, 3):
            torch.testing.assert_close(found[i], torch.stack([rank[i] for rank in data]).mean(0))
        assert not found[2].any()


def test_nothing_to_send_ends_at_once() -> None:
    assert sent_bytes(2, [(5,)], Silent()) == [[]]


def test_error_feedback_converges_where_two_bits_alone_do_not() -> None:
    """With error feedback, the mean of many averages of one gradient is that gradient."""
    data = [drawn([(1000,)], rank, 0) for rank in range(2)]
    two_bits = Compressed(QSGD(bits=2, block=1000, scale="max", rounding="nearest"))
    expected, off = (data[0][0] + data[1][0]) / 2, []
    for aggregator in (two_bits, ErrorFeedback(two_bits)):
        found = averaged([(1000,)], aggregator, [data] * 100)[0]
        off.append((sum(averages[0] for averages, _ in found) / 100 - expected).norm())
    assert off[1] < 0.1 * off[0]


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_dense_averages_in_its_dtype(dtype: torch.dtype | None) -> None:
    data = [drawn([(300,)], rank, 0) for rank in range(3)]
    expected = torch.stack([mine[0] for mine in data]).mean(0)
    tolerance = 1e-6 if dtype is None else 2 * torch.finfo(dtype).eps
    found = averaged([(300,)], Dense(dtype), [data])[0][0][0][0]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
