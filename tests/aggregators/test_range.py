"""Values that are not finite, or that fp16 on the wire cannot hold, leave the state of their
parameters as it was; the scale of gradients changes nothing but the scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from averaging import Parameters, Shape, drawn, fed
from gradwire.aggregators import (
    THC,
    Aggregator,
    ARTopK,
    Compressed,
    DeepGradientCompression,
    Dense,
    ErrorFeedback,
    LWTopK,
    PowerSGD,
    TopKC,
)
from gradwire.aggregators import DeepGradientCompression as Deep
from gradwire.codecs import DGC, Cast, GradDrop, HardThreshold, MSTopK, RandomK, TopK
from gradwire.engine import Communicator
from products import exhaustive
from ranks import as_threads

SHAPES: list[Shape] = [(20, 30), (1,), (7,), (3, 4, 5), (1000,), (20, 30), (0,), (), (64, 8)]
SICK = (0, 4, 5)  # parameters with values that are not finite


@pytest.mark.parametrize(
    ("aggregator", "rank", "dtype", "bad"),
    [
        (PowerSGD(2), 1, torch.float32, torch.inf),
        (PowerSGD(2), 1, torch.float32, torch.nan),
        (PowerSGD(2), 1, torch.float32, -torch.inf),
        (THC(5, 4, "partial", 32), 0, torch.float32, torch.inf),
        (THC(5, 4, "full", 32), 2, torch.bfloat16, torch.nan),
        (THC(5, 4, "none", 32), 0, torch.float16, -torch.inf),
        (TopKC(4, 16, scope="layer"), 0, torch.float32, torch.nan),
        (TopKC(4, 16, scope="layer", permuted=True), 2, torch.float16, torch.inf),
        (TopKC(4, 16, scope="layer"), 2, torch.bfloat16, -torch.inf),
        # Rank 2 leads in this step, by turns; and other ranks may be at other positions.
        (ARTopK(0.01, "round_robin", "layer"), 2, torch.float32, torch.nan),
        (ARTopK(0.01, "round_robin", "model"), 0, torch.float32, torch.inf),
        (ARTopK(0.01, "variance", "layer"), 1, torch.float32, -torch.inf),
        (ARTopK(0.01, "auto", "model"), 1, torch.float32, torch.nan),
        (Deep(0.05), 1, torch.float32, torch.inf),
        (Deep(0.05), 1, torch.float32, torch.nan),
        (Deep(0.05, clip=2.0), 1, torch.float32, -torch.inf),
        *exhaustive(
            (THC(5, 4, "partial", 32), 2, torch.float16, torch.nan),
            (THC(5, 4, "full", 32), 2, torch.float32, torch.nan),
            (THC(5, 4, "full", 32), 0, torch.bfloat16, -torch.inf),
            (TopKC(4, 16, scope="layer", permuted=True), 0, torch.float32, torch.nan),
            (TopKC(4, 16, scope="layer"), 2, torch.float16, torch.inf),
            (TopKC(4, 16, scope="layer", permuted=True), 2, torch.bfloat16, -torch.inf),
            (ARTopK(0.01, "variance", "model"), 2, torch.float32, torch.inf),
            (ARTopK(0.01, "auto", "layer"), 0, torch.float32, torch.nan),
        ),
    ],
    ids=str,
)
def test_what_is_not_finite_travels_and_leaves_state_as_it_was(
    aggregator: Aggregator, rank: int, dtype: torch.dtype, bad: float
) -> None:
    """At one place, at a ragged end, and everywhere. Other parameters go on, but where one
    selection, or the norm that clips, is of all."""
    whole = aggregator.scope == "model" or getattr(aggregator, "clip", None) is not None

    def body(comm: Communicator) -> None:
        mine = Parameters(comm, SHAPES, fed(aggregator))
        for step in range(2):
            mine.average(drawn(SHAPES, comm.rank, step, dtype))
        mine.members[4].state["residual"] += 1.0  # as another aggregator may have left it
        before, gradients = mine.kept(), drawn(SHAPES, comm.rank, 2, dtype)
        if comm.rank == rank:
            gradients[0][3, 4] = bad
            gradients[4][-1] = bad
            gradients[5].fill_(bad)
        averages = mine.average(gradients)
        for at, (average, kept, left) in enumerate(zip(averages, before, mine.kept(), strict=True)):
            unchanged = all(torch.equal(t, left[key]) for key, t in kept.items())
            assert all(t.isfinite().all() for t in left.values())
            if whole:
                assert unchanged
                assert not average.any() or not average.isfinite().all()
            elif at in SICK:
                assert unchanged
                assert not average.isfinite().all()
            else:
                assert average.isfinite().all()
                assert not unchanged or at != 8
        if isinstance(aggregator, THC):
            assert not averages[0][3, 4].isfinite()
            assert not averages[4][-1].isfinite()
            assert not averages[5].isfinite().any()
            assert aggregator.rotation == "full" or averages[0].isfinite().any()
        mine.average(drawn(SHAPES, comm.rank, 3, dtype))
        assert not torch.equal(mine.states()[0], before[0]["residual"])

    as_threads(3, body)


@pytest.mark.parametrize(
    ("aggregator", "ranks", "algorithm", "scales"),
    [
        (ErrorFeedback(THC(4, 4, "full", 32)), 3, "sra", (-60, 17, 80)),
        (THC(4, 4, "none", 32), 3, "sra", (-60, 17, 80)),
        (ErrorFeedback(TopKC(8, 16, scope="layer")), 2, "sra", (-60, -20, 17, 48)),
        (ErrorFeedback(TopKC(8, 16, scope="layer")), 3, "ring", (-60, -20, 17, 48)),
        # P of a warm start has the square of a gradient's size.
        (ErrorFeedback(PowerSGD(2)), 2, "sra", (-40, 16, 60)),
        *exhaustive((ErrorFeedback(THC(4, 4, "partial", 32)), 3, "sra", (-60, 17, 80))),
    ],
    ids=str,
)
def test_no_scale_is_too_large_or_too_small(
    aggregator: Aggregator, ranks: int, algorithm: str, scales: tuple[int, ...]
) -> None:
    """A GradScaler's scale, a power of two, changes nothing but the scale: neither a square nor an
    fp16 value vanishes or overflows."""

    def body(comm: Communicator) -> list[list[torch.Tensor]]:
        found = []
        for scale in (0, *scales):
            mine = Parameters(comm, SHAPES, aggregator, algorithm=algorithm)
            averages: list[torch.Tensor] = []
            for step in range(4):
                given = [g * 2.0**scale for g in drawn(SHAPES, comm.rank, step)]
                averages += mine.average(given)
            found.append([t / 2.0**scale for t in [*averages, *mine.states()]])
        return found

    for plain, *others in as_threads(ranks, body):
        assert any(t.any() for t in plain)
        for scaled in others:
            assert all(map(torch.equal, plain, scaled))


SHAPE = (300,)
AT = 7  # the entry that overflows
SCALED = 50.0 * 65536  # the gradient 50 under a GradScaler's first scale

# What sends fp16: with error feedback, and without.
FED: dict[str, Aggregator] = {
    "fp16": ErrorFeedback(Compressed(Cast("fp16"))),
    "ring": ErrorFeedback(Compressed(Cast("fp16"), "ring")),
    "dense": ErrorFeedback(Dense(torch.float16)),
    "topk": ErrorFeedback(Compressed(TopK(0.1))),
    "mstopk": ErrorFeedback(Compressed(MSTopK(0.1))),
    "dgc, the codec": ErrorFeedback(Compressed(DGC(0.1))),
    "graddrop": ErrorFeedback(Compressed(GradDrop(0.1))),
    "hardthreshold": ErrorFeedback(Compressed(HardThreshold(1.0, 0.2))),
    "randomk": ErrorFeedback(Compressed(RandomK(1.0))),
    "lwtopk": ErrorFeedback(LWTopK(0.1)),
    "artopk": ErrorFeedback(ARTopK(0.1)),
    "artopk auto": ErrorFeedback(ARTopK(0.1, "auto", scope="model")),
    "dgc": DeepGradientCompression(0.1),
    "dgc alone": DeepGradientCompression(0.1, momentum=0),
}
PLAIN: dict[str, Aggregator] = {
    "fp16": Compressed(Cast("fp16")),
    "ring": Compressed(Cast("fp16"), "ring"),
    "dense": Dense(torch.float16),
    "topk": LWTopK(0.1),
    "artopk": ARTopK(0.1),
}
RESTORES = ("artopk", "artopk auto", "dgc", "dgc alone")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in FED), ("topk", torch.bfloat16), ("dgc", torch.bfloat16)],
)
def test_a_gradient_that_overflows_is_infinite_and_leaves_residuals_clean(
    name: str, dtype: torch.dtype
) -> None:
    """As an Inf that came in. Under a scale that fits, the next step loses nothing."""

    def body(comm: Communicator) -> list[Any]:
        mine = Parameters(comm, [SHAPE], FED[name])
        mine.average(drawn([SHAPE], comm.rank, 0, dtype))
        found: list[Any] = []
        for scale in (1.0, 1.0, 2.0**-9):  # ARTopK has another leader in each
            (g,) = drawn([SHAPE], comm.rank, 1, dtype)
            g[AT] = SCALED * scale if comm.rank == 1 else 0.0
            kept, speed = mine.states()[0], mine.states("velocity")[0]
            (average,) = mine.average([g])
            found.append((g, kept, speed, average, mine.states()[0]))
        return found

    found = as_threads(2, body)
    for (_, before, _, average, after), other in zip(*(mine[:2] for mine in found), strict=True):
        assert not average.isfinite().all()
        assert not average[AT].isfinite() or name.startswith("artopk")
        assert torch.equal(average.isfinite(), other[3].isfinite())
        for kept, left in ((before, after), (other[1], other[4])):
            assert left.isfinite().all()
            assert torch.equal(left, kept) or name not in RESTORES
        assert other[4][AT] == other[1][AT]
    (g, before, speed, average, after), other = (mine[2] for mine in found)
    assert average.isfinite().all()
    assert torch.equal(average, other[3])
    momentum = 0.9 * (name == "dgc")
    brought = g.float() + other[0].float() + momentum * (speed + other[2]) + before + other[1]
    slack = 2.0**-8 * float(brought.abs().max()) if dtype == torch.bfloat16 else 0.02
    torch.testing.assert_close(2 * average.float() + after + other[4], brought, rtol=0, atol=slack)


@pytest.mark.parametrize("name", FED)
def test_a_residual_that_overflows_is_sent_in_parts(name: str) -> None:
    """A GradScaler could not lower it: it would skip every step from then on."""

    def body(comm: Communicator) -> list[torch.Tensor]:
        mine = Parameters(comm, [SHAPE], FED[name])
        mine.average([torch.zeros(SHAPE)])
        mine.members[0].state["residual"].view(-1)[AT] = 1e5
        gradients = torch.zeros(SHAPE)
        gradients[AT] = 1000.0
        first = mine.average([gradients])[0]
        after = mine.states()[0]
        return [first, after, mine.average([torch.zeros(SHAPE)])[0]]

    found = as_threads(2, body)
    (first, after, second), other = found
    assert torch.equal(first, other[0])
    assert first[AT] > 30000
    owed = torch.zeros(SHAPE).index_fill_(0, torch.tensor(AT), 202000.0)
    torch.testing.assert_close(2 * first + after + other[1], owed)
    assert second.isfinite().all()
    assert second[AT] > 0


@pytest.mark.parametrize("name", PLAIN)
def test_without_error_feedback_an_overflow_is_infinite(name: str) -> None:
    def body(comm: Communicator) -> list[torch.Tensor]:
        mine = Parameters(comm, [SHAPE], PLAIN[name])
        (g,) = drawn([SHAPE], comm.rank, 0)
        g[AT] = SCALED * (comm.rank == 1)
        over = mine.average([g])[0]
        g = torch.ones(SHAPE)
        g[AT] = 65504.0
        return [over, mine.average([g])[0]]

    first, second = as_threads(2, body)
    assert all(map(torch.equal, *([t.nan_to_num(7.0) for t in mine] for mine in (first, second))))
    assert not first[0].isfinite().all()
    assert name == "artopk" or not first[0][AT].isfinite()
    if name != "ring":  # where the sum of two travels
        assert first[1][AT] == 65504
        assert first[1].isfinite().all()


def test_what_is_too_small_for_fp16_waits_in_the_residual() -> None:
    """Without error feedback it is lost, as in torch."""
    gradients, steps = torch.full(SHAPE, 2e-9), 40

    def body(comm: Communicator) -> list[torch.Tensor]:
        mine = Parameters(comm, [SHAPE], FED["fp16"])
        total = torch.zeros(SHAPE)
        for _ in range(steps):
            total += mine.average([gradients])[0]
        lost = Parameters(comm, [SHAPE], PLAIN["fp16"]).average([gradients])[0]
        return [total, mine.states()[0], lost]

    first, second = as_threads(2, body)
    assert (first[0] > 0).all()
    assert not first[2].any()
    both = 2 * first[0] + first[1] + second[1]
    torch.testing.assert_close(both, 2 * steps * gradients, rtol=1e-5, atol=0)
