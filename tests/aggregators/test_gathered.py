"""Exact top-k by all-gather, per layer and over the whole model, and of the sum (global top-k):
against a reference in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from averaging import Shape, averaged, drawn, sent_bytes
from gradwire.aggregators import (
    Compressed,
    ErrorFeedback,
    GlobalTopK,
    LWTopK,
    registry,
)
from gradwire.codecs import MSTopK, RandomK
from gradwire.engine import HEADER_BYTES
from gradwire.lang import layout
from products import exhaustive

SHAPES: list[Shape] = [(20, 30), (1,), (7,), (3, 4, 5), (700,), (0,), ()]


def whole(rank: int, step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Small whole numbers, which fp16 holds, with many ties."""
    return [(3 * g).round().to(dtype) for g in drawn(SHAPES, rank, step)]


def sparse(values: torch.Tensor, density: float) -> torch.Tensor:
    """The largest values, of equal ones the first; zero elsewhere."""
    k = min(max(1, math.floor(density * len(values))), len(values))
    at = values.abs().sort(descending=True, stable=True).indices[:k]
    return torch.zeros_like(values).index_copy_(0, at, values[at])


@pytest.mark.parametrize(
    ("ranks", "density", "dtype", "scope"),
    [
        (2, 0.1, torch.float32, "layer"),
        (2, 0.1, torch.float32, "model"),
        (3, 0.01, torch.float16, "layer"),
        (5, 1, torch.bfloat16, "layer"),
    ],
)
def test_it_is_exact_top_k_with_error_feedback(
    ranks: int, density: float, dtype: torch.dtype, scope: str
) -> None:
    steps, narrow = 4, dtype == torch.float16
    data = [[whole(r, step, dtype) for r in range(ranks)] for step in range(steps)]
    options: dict[str, Any] = {
        "density": density, "values": "fp32" if narrow else "fp16", "scope": scope
    }  # fmt: skip
    found = averaged(SHAPES, ErrorFeedback(LWTopK(**options)), data)
    lengths = [math.prod(shape) for shape in SHAPES]
    kept = [torch.zeros(sum(lengths)).double()] * ranks
    eps = max(torch.finfo(dtype).eps, 1e-6)
    for step in range(steps):
        sent = []
        for rank in range(ranks):
            # In fp32, as the aggregator adds: what is equal there may differ in float64.
            fed = torch.cat([g.float().view(-1) for g in data[step][rank]]) + kept[rank].float()
            fed = fed.double()
            selections = fed.split(lengths if scope == "layer" else len(fed))
            sent.append(torch.cat([sparse(part, density) for part in selections]))
            kept[rank] = fed - sent[rank]
        means = torch.stack(sent).mean(0)
        for at, expected in enumerate(means.split(lengths)):
            average = found[0][step][0][at].view(-1)
            torch.testing.assert_close(average.double(), expected, rtol=eps, atol=1e-6 * narrow)
        lost = means - torch.cat([a.double().view(-1) for a in found[0][step][0]])
        for rank, mine in enumerate(found):
            after = torch.cat(mine[step][1]).double()
            if not narrow:
                assert torch.equal(after, kept[rank])
            else:  # also what rounding of the average lost
                torch.testing.assert_close(after, kept[rank] + lost, rtol=0, atol=1e-5)
                kept[rank] = after


@pytest.mark.parametrize(
    ("ranks", "density", "dtype"),
    [
        (2, 0.001, torch.bfloat16),
        (3, 1, torch.float32),
        (5, 0.1, torch.float16),
        *exhaustive((8, 0.01, torch.float32)),
    ],
)
def test_global_top_k_keeps_the_largest_of_the_sum(
    ranks: int, density: float, dtype: torch.dtype
) -> None:
    """Not more than k, which no rank's largest need be among; each residual keeps the rank's own
    values elsewhere, and what the average loses in its dtype. Many values are equal."""
    steps = 4
    data = [[whole(r, step, dtype) for r in range(ranks)] for step in range(steps)]
    found = averaged(SHAPES, ErrorFeedback(GlobalTopK(density)), data)
    lengths = [math.prod(shape) for shape in SHAPES]
    k, own = max(1, math.floor(density * sum(lengths))), 0
    kept = [torch.zeros(sum(lengths)) for _ in range(ranks)]
    for step in range(steps):
        fed = [
            torch.cat([g.float().view(-1) for g in data[step][rank]]) + kept[rank]
            for rank in range(ranks)
        ]
        mean = torch.stack(fed).sum(0) * (1 / ranks)  # in fp32
        expected = sparse(mean, density)
        places = sparse(mean.abs() + 1, density) != 0
        assert int(places.sum()) == k
        own += int((sparse(fed[0], density) != 0).logical_and(~places).sum())
        average = torch.cat([a.view(-1) for a in found[0][step][0]])
        assert average.dtype == dtype
        assert torch.equal(average, expected.to(dtype))
        lost = expected - average.float()
        for rank, mine in enumerate(found):
            kept[rank] = torch.where(places, 0.0, fed[rank]) + lost
            assert torch.equal(torch.cat(mine[step][1]), kept[rank])
    assert density == 1 or own > 0


def test_bytes_are_those_of_the_formula() -> None:
    shapes: list[Shape] = [(60, 80), (33,), (9, 9)]
    chosen, ranks = LWTopK(0.02), 3
    numels = [math.prod(shape) for shape in shapes]
    aligned = sum(-(-layout(chosen.codec).nbytes(n) // 16) * 16 for n in numels)
    expected = ranks * (ranks - 1) * (aligned + HEADER_BYTES)
    assert sent_bytes(ranks, shapes, ErrorFeedback(chosen)) == [[expected]]
    told = [chosen.payload_bytes(shape, torch.float32) for shape in shapes]
    assert told == [layout(chosen.codec).nbytes(n) for n in numels]


def test_global_top_k_sends_dense_bytes() -> None:
    shapes: list[Shape] = [(64, 96), (2048,)]
    told = [GlobalTopK(0.02).payload_bytes(shape, torch.float16) for shape in shapes]
    assert told == [4 * 64 * 96, 4 * 2048]
    sent = sum(sent_bytes(2, shapes, ErrorFeedback(GlobalTopK(0.02)))[0])
    assert 0 <= sent - 2 * sum(told) <= 8 * HEADER_BYTES  # 2 (N - 1) / N of them from each of two


def test_random_k_is_unbiased_through_all_gather_by_name() -> None:
    """The mean over many steps is the gradient's, within five standard errors; no index is sent."""
    made = registry.get("randomk:density=0.1:unbiased=true:algorithm=all_gather")
    assert made == Compressed(RandomK(0.1, unbiased=True), "all_gather")
    steps, (gradient,) = 200, drawn([(20, 30)], 0, 0)
    found = averaged([(20, 30)], made, [[[gradient]] * 2] * steps)[0]
    mean = sum(averages[0] for averages, _ in found) / steps
    deviation = gradient.abs() * math.sqrt(9 / steps)  # one of ten, times ten
    assert ((mean - gradient).abs() <= 5 * deviation + 1e-3 * gradient.abs()).all()
    assert made.payload_bytes((20, 30), torch.float32) == 2 * 60


def test_names_take_algorithm_and_scope_beside_the_options_of_a_codec() -> None:
    made = registry.get("mstopk:density=0.02:algorithm=all_gather:scope=model")
    assert made == Compressed(MSTopK(0.02), "all_gather", "model")
    assert registry.changed(made, {"density": 0.1}) == Compressed(
        MSTopK(0.1), "all_gather", "model"
    )
    assert registry.changed(made, {"scope": "layer"}) == Compressed(MSTopK(0.02), "all_gather")
    assert str(made).endswith(", all_gather, whole model")
