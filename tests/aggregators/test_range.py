"""Values that are not finite travel, and leave the state of their parameters as it was; the scale
of gradients changes nothing but the scale."""

from __future__ import annotations

import pytest
import torch

from averaging import Parameters, Shape, drawn
from gradwire.aggregators import (
    THC,
    Aggregator,
    ARTopK,
    ErrorFeedback,
    PowerSGD,
    TopKC,
)
from gradwire.aggregators import DeepGradientCompression as Deep
from gradwire.engine import Communicator
from products import exhaustive
from ranks import as_threads

SHAPES: list[Shape] = [(20, 30), (1,), (7,), (3, 4, 5), (1000,), (20, 30), (0,), (), (64, 8)]
SICK = (0, 4, 5)  # parameters with values that are not finite


def fed(aggregator: Aggregator) -> Aggregator:
    return aggregator if aggregator.own_feedback else ErrorFeedback(aggregator)


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
