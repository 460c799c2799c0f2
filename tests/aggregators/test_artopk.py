"""ARTopK: against the paper's STAR-Topk (Alg. 1) in float64, and its bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import gradwire as gw
from averaging import Parameters, Shape, drawn
from gradwire.aggregators import ARTopK, ErrorFeedback
from gradwire.aggregators.artopk import largest
from gradwire.engine import HEADER_BYTES, Communicator
from products import every_pair
from ranks import as_threads

SHAPES: list[Shape] = [(20, 30), (1,), (7,), (3, 4, 5), (200,), (0,), ()]
DENSITIES = [0.1, 0.01, 1]


class Star:
    """STAR-Topk, all ranks at once, in float64."""

    def __init__(self, density: float, ranks: int) -> None:
        self.density = density
        self.residuals = [[torch.zeros(math.prod(s)).double() for s in SHAPES]] * ranks

    def step(self, number: int, gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The averages; gradients[rank][parameter]."""
        ranks = len(gradients)
        fed = [
            [g.double().view(-1) + e for g, e in zip(mine, kept, strict=True)]
            for mine, kept in zip(gradients, self.residuals, strict=True)
        ]
        averages = []
        self.residuals = [[] for _ in range(ranks)]
        for at, numel in enumerate(len(f) for f in fed[0]):
            size = [abs(float(v)) for v in fed[number % ranks][at]]
            k = min(max(1, math.floor(self.density * numel)), numel)
            chosen = sorted(range(numel), key=lambda i: (-size[i], i))[:k]
            mask = torch.zeros(numel).double()
            mask[chosen] = 1.0
            for mine, kept in zip(fed, self.residuals, strict=True):
                kept.append(mine[at] * (1 - mask))
            averages.append(torch.stack([mine[at] * mask for mine in fed]).mean(0))
        return averages


def whole(rank: int, step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gradients of small whole numbers: sums are exact, and there are many ties."""
    return [(2 * g).round().to(dtype) for g in drawn(SHAPES, rank, step)]


@pytest.mark.parametrize(
    ("ranks", "density", "dtype"),
    every_pair([2, 3, 4, 5], DENSITIES, [torch.float32, torch.float16, torch.bfloat16]),
)
def test_it_is_star_topk(ranks: int, density: float, dtype: torch.dtype) -> None:
    steps = 3 * ranks
    data = [[whole(r, step, dtype) for r in range(ranks)] for step in range(steps)]

    def body(comm: Communicator) -> list[Any]:
        mine = Parameters(comm, SHAPES, ErrorFeedback(ARTopK(density)))
        return [(mine.average(data[step][comm.rank]), mine.states()) for step in range(steps)]

    found = as_threads(ranks, body)
    star = Star(density, ranks)
    eps = max(torch.finfo(dtype).eps, 1e-6)
    for step in range(steps):
        for at, expected in enumerate(star.step(step, data[step])):
            average = found[0][step][0][at].view(-1)
            assert all(torch.equal(mine[step][0][at].view(-1), average) for mine in found)
            assert torch.equal(average != 0, expected != 0), "other places"
            torch.testing.assert_close(average.double(), expected, rtol=eps, atol=0)
            for mine, kept in zip(found, star.residuals, strict=True):
                assert torch.equal(mine[step][1][at].double(), kept[at])
    if density == 1:
        assert not any(kept.any() for mine in star.residuals for kept in mine)


@pytest.mark.parametrize("k", [0, 1, 3, 7, 8])
def test_of_equal_values_the_lowest_come_first(k: int) -> None:
    values = torch.tensor([1.0, -3.0, 3.0, 0.0, -1.0, 3.0, 1.0, 0.0])
    expected = [1, 2, 5, 0, 4, 6, 3, 7][:k]
    assert largest(values, k).tolist() == sorted(expected)


def test_what_is_not_finite_is_largest() -> None:
    values = torch.tensor([1.0, torch.nan, 1e38, -torch.inf, torch.inf])
    assert largest(values, 2).tolist() == [1, 3]
    assert largest(values, 4).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(("ranks", "density"), every_pair([2, 3, 5], DENSITIES))
def test_bytes_are_those_of_the_formula(ranks: int, density: float) -> None:
    """k indices from the leader, k values all-reduced, in chunks of whole blocks of 1024."""
    shape, numel = (60, 80), 4800

    def body(comm: Communicator) -> list[list[int]]:
        mine = Parameters(comm, [shape], ErrorFeedback(ARTopK(density)))
        for step in range(ranks):
            mine.average(drawn([shape], comm.rank, step))
        return [[o.wire_bytes for o in outcomes] for outcomes in mine.outcomes]

    found = as_threads(ranks, body)
    k = max(1, int(density * numel))
    assert ARTopK(density).payload_bytes(shape, torch.float32) == 8 * k
    # Each value crosses N - 1 links in a broadcast, and twice as many in an all-reduce.
    crossing = (ranks - 1) * (4 * k + min(ranks, -(-k // 1024)) * HEADER_BYTES)
    for step in range(ranks):
        assert [sum(sent) for sent in zip(*(mine[step] for mine in found), strict=True)] == [
            crossing,
            2 * crossing,
        ]


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("sick", [0, 1, 2])
def test_what_is_not_finite_travels_and_leaves_state_as_it_was(sick: int, bad: float) -> None:
    """On the leader (rank 2 in this step), and on ranks at indices that it does not choose."""

    def body(comm: Communicator) -> None:
        mine = Parameters(comm, SHAPES, ErrorFeedback(ARTopK(0.01)))
        for step in range(2):
            mine.average(drawn(SHAPES, comm.rank, step))
        before, gradients = mine.states(), drawn(SHAPES, comm.rank, 2)
        if comm.rank == sick:
            gradients[0][3, 4] = bad
        averages = mine.average(gradients)
        assert not averages[0].isfinite().all()
        assert all(average.isfinite().all() for average in averages[1:])
        after = mine.states()
        assert torch.equal(before[0], after[0])
        assert not torch.equal(before[4], after[4])

    as_threads(3, body)


@pytest.mark.parametrize("density", [0, -0.1, 1.1, torch.nan, "0.1", None])
def test_options_are_checked(density: Any) -> None:
    with pytest.raises(gw.ConfigError, match="density="):
        ARTopK(density)
