"""Deep gradient compression: against Lin et al.'s algorithm in float64; its warm-up, its bytes, and
what happens on one rank."""

from __future__ import annotations

import math

import pytest
import torch

from averaging import Parameters, Shape, averaged, drawn
from gradwire.aggregators import DeepGradientCompression as Deep
from gradwire.codecs import DGC
from gradwire.engine import HEADER_BYTES, Communicator
from gradwire.lang import layout
from gradwire.planner import Rules, make_plan
from products import exhaustive
from ranks import as_threads

SHAPES: list[Shape] = [(60, 50), (7,), (11, 20, 3), (0,), ()]
Tensors = list[torch.Tensor]


class Reference:
    """One rank of Alg. 1 to 4, in float64. It has no sampled threshold: at these densities the
    sample of a small tensor gives a low one."""

    def __init__(self, made: Deep, ranks: int) -> None:
        self.made = made
        self.ranks = ranks
        self.u = [torch.zeros(math.prod(s)).double() for s in SHAPES]
        self.r = [torch.zeros(math.prod(s)).double() for s in SHAPES]

    def sent(self, gradients: Tensors, density: float) -> Tensors:
        """What this rank sends."""
        given = [g.double().view(-1) for g in gradients]
        if self.made.clip is not None:
            norm = torch.cat(given).norm()
            given = [g * min(1.0, self.made.clip * math.sqrt(self.ranks) / norm) for g in given]
        found = []
        for at, g in enumerate(given):
            self.u[at] = self.made.momentum * self.u[at] + g
            self.r[at] = self.r[at] + self.u[at]
            k = min(max(1, math.floor(density * len(g))), len(g))
            mask = torch.zeros_like(g)
            order = self.r[at].abs().sort(descending=True, stable=True).indices
            mask[order[:k]] = 1.0
            found.append(self.r[at] * mask)
            self.r[at] = self.r[at] * (1 - mask)
            self.u[at] = self.u[at] * (1 - mask)
        return found


@pytest.mark.parametrize(
    ("ranks", "density", "momentum", "clip", "warmup", "dtype"),
    [
        (2, 0.1, 0.9, None, 0, torch.float32),
        (3, 0.02, 0.0, 4.0, 4, torch.float32),
        (5, 0.05, 0.5, 4.0, 0, torch.float16),
        *exhaustive(
            (8, 0.02, 0.9, None, 4, torch.float16),
            (2, 0.05, 0.0, None, 4, torch.float16),
            (3, 0.1, 0.9, 4.0, 4, torch.float32),
        ),
    ],
)
def test_it_is_the_algorithm(
    ranks: int,
    density: float,
    momentum: float,
    clip: float | None,
    warmup: int,
    dtype: torch.dtype,
) -> None:
    made, steps = Deep(density, momentum, clip, warmup, "fp32"), 6
    data = [[drawn(SHAPES, r, step, dtype) for r in range(ranks)] for step in range(steps)]
    found = averaged(SHAPES, made, data, "velocity")
    models = [Reference(made, ranks) for _ in range(ranks)]
    eps = max(torch.finfo(dtype).eps, 1e-5)
    close = {"rtol": eps, "atol": eps}
    for step in range(steps):
        now = made.at(step).density
        sent = [model.sent(given, now) for model, given in zip(models, data[step], strict=True)]
        for at in range(len(SHAPES)):
            average = found[0][step][0][at].double().view(-1)
            expected = torch.stack([one[at] for one in sent]).mean(0)
            torch.testing.assert_close(average, expected, **close)
            if dtype != torch.float32:
                for model in models:  # what rounding the average loses is kept
                    model.r[at] += expected - average
            for mine, model in zip(found, models, strict=True):
                torch.testing.assert_close(mine[step][1][at].double(), model.r[at], **close)
                if momentum:
                    torch.testing.assert_close(mine[step][2][at].double(), model.u[at], **close)


def test_clipping_is_that_of_the_average_of_unlike_gradients() -> None:
    """Orthogonal, of equal norms. The average of equal ones has up to sqrt(N) * clip."""
    shapes: list[Shape] = [(8, 5), (24,)]

    def gradients(rank: int, ranks: int, norm: float, alike: bool) -> Tensors:
        """Whose average has this norm."""
        given = [torch.zeros(shape) for shape in shapes]
        for g in given:
            g.view(-1)[slice(None) if alike else slice(rank, None, ranks)] = 1.0
        own = torch.cat([g.view(-1) for g in given]).norm()
        return [g * (norm if alike else norm * math.sqrt(ranks)) / own for g in given]

    def averages(given: list[Tensors], clip: float) -> Tensors:
        aggregator = Deep(1.0, momentum=0, clip=clip, values="fp32")
        found = averaged(shapes, aggregator, [given])
        assert not any(kept.any() for ((_, residuals),) in found for kept in residuals)
        first: Tensors = found[0][0][0]
        return first

    for ranks, norm, clip in ((4, 2.0, 2.0), (4, 2.01, 2.0), (2, 3.0, 1.0), (1, 3.0, 1.0)):
        given = [gradients(rank, ranks, norm, alike=False) for rank in range(ranks)]
        found = averages(given, clip)
        expected = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for p, each in zip(expected, zip(*given, strict=True), strict=True):
            p.grad = torch.stack(each).mean(0)
        assert torch.nn.utils.clip_grad_norm_(expected, clip) == pytest.approx(norm)
        for p, average in zip(expected, found, strict=True):
            torch.testing.assert_close(average, p.grad)
    for norm, left in ((3.0, 3.0), (5.0, 4.0)):
        found = averages([gradients(rank, 4, norm, alike=True) for rank in range(4)], clip=2.0)
        assert torch.cat([a.view(-1) for a in found]).norm() == pytest.approx(left)


def test_densities_of_the_warm_up_and_their_bytes() -> None:
    made = Deep(0.001, warmup=10)
    assert made.stages() == [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    densities = [made.at(step).density for step in range(12)]
    assert densities == [
        *([1 / 4] * 3), *([1 / 16] * 2), *([1 / 64] * 3), *([1 / 256] * 2), 0.001, 0.001
    ]  # fmt: skip
    assert [made.at((3 << 32) + step).density for step in range(12)] == densities
    assert Deep(0.25, warmup=10).stages() == Deep(0.01).stages() == []
    variants = [made.variant(step, 4) for step in range(12)]
    assert list(map(densities.index, densities)) == list(map(variants.index, variants))
    shape, ranks = (100, 300), 3

    def body(comm: Communicator) -> list[int]:
        mine = Parameters(comm, [shape], made)
        for step in range(12):
            mine.average(drawn([shape], comm.rank, step))
        return [outcome.wire_bytes for (outcome,) in mine.outcomes]

    for sent in as_threads(ranks, body):
        for nbytes, density in zip(sent, densities, strict=True):
            told = made.at(densities.index(density)).payload_bytes(shape, torch.float32)
            assert told == layout(DGC(density)).nbytes(math.prod(shape))
            # The threshold is sampled, so fewer values may be sent; a table has 16 bytes.
            most = (ranks - 1) * (told + HEADER_BYTES + 32)
            assert 0.8 * (ranks - 1) * told <= nbytes <= most


def test_one_rank_alone_has_momentum() -> None:
    def body(comm: Communicator) -> None:
        for momentum in (0.9, 0.0):
            mine, u = Parameters(comm, [(5, 6)], Deep(0.01, momentum)), torch.zeros(5, 6)
            for step in range(4):
                (g,) = drawn([(5, 6)], 0, step)
                u = momentum * u + g
                torch.testing.assert_close(mine.average([g])[0], u)
            assert not mine.outcomes[-1]

    as_threads(1, body)


def test_one_rank_alone_keeps_what_fp16_cannot_hold() -> None:
    def body(comm: Communicator) -> None:
        mine, u, sent = Parameters(comm, [(5,)], Deep(0.01, 0.9)), 0.0, torch.zeros(5)
        total = 0.0
        for _ in range(6):
            u = 0.9 * u + 30000.0
            total += u
            (average,) = mine.average([torch.full((5,), 30000.0).half()])
            assert average.isfinite().all()
            sent += average.float()
            torch.testing.assert_close(sent + mine.states()[0], torch.full((5,), total))
        assert (mine.states()[0] > 65504).all()

    as_threads(1, body)


def test_a_plan_wraps_no_error_feedback_around_it() -> None:
    rules = Rules().changed({"density": 0.01}, codec="dgc", error_feedback=True)
    for ranks in (1, 2):
        (planned,) = make_plan([("w", torch.zeros(3, 4))], rules, ranks).parameters
        assert planned.aggregator == Deep(0.01)
        assert planned.feedback
