"""What fp16 on the wire cannot hold: Inf on all ranks if gradients are the reason, so that a
GradScaler lowers its scale; kept in the residual if residuals are. Residuals stay finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from averaging import Parameters, drawn
from gradwire.aggregators import (
    Aggregator,
    ARTopK,
    Compressed,
    DeepGradientCompression,
    Dense,
    ErrorFeedback,
    LWTopK,
)
from gradwire.codecs import DGC, Cast, GradDrop, HardThreshold, MSTopK, RandomK, TopK
from gradwire.engine import Communicator
from ranks import as_threads

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
    torch.testing.assert_close(2 * first + after + other[1], _only(202000.0))
    assert second.isfinite().all()
    assert second[AT] > 0


def _only(value: float) -> torch.Tensor:
    made = torch.zeros(SHAPE)
    made[AT] = value
    return made


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
