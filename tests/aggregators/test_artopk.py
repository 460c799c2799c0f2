"""ARTopK: against the paper's STAR-Topk (Alg. 1) in float64, and its bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from averaging import Parameters, Shape, averaged, drawn, sent_bytes
from gradwire.aggregators import ARTopK, ErrorFeedback, selection
from gradwire.engine import HEADER_BYTES, Communicator
from gradwire.lang import layout
from products import exhaustive
from ranks import as_threads
from rooms.engine import ALIGNMENT

SHAPES: list[Shape] = [(20, 30), (1,), (7,), (3, 4, 5), (200,), (0,), ()]


class Reference:
    """Alg. 1 for all ranks at once, in float64, with our third choice of a leader."""

    def __init__(self, made: ARTopK, ranks: int) -> None:
        self.made = made
        self.residuals = [[torch.zeros(math.prod(s)).double() for s in SHAPES]] * ranks
        # By parameter, or of the first by name, as it is with one selection.
        self.waited = [[0] * ranks for _ in SHAPES]

    def step(self, number: int, gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The averages; gradients[rank][parameter]."""
        fed = [
            [g.double().view(-1) + e for g, e in zip(mine, kept, strict=True)]
            for mine, kept in zip(gradients, self.residuals, strict=True)
        ]
        together = [[at] for at in range(len(SHAPES))]
        if self.made.scope != "layer":
            together = [list(range(len(SHAPES)))]
        self.residuals = [list(mine) for mine in fed]
        averages = [torch.zeros_like(f) for f in fed[0]]
        for parts in together:
            whole = [torch.cat([mine[at] for at in parts]) for mine in fed]
            chosen = [self.largest(one) for one in whole]
            mask = torch.zeros_like(whole[0])
            mask[chosen[self.leader(number, whole, chosen, parts[0])]] = 1.0
            lengths = [len(fed[0][at]) for at in parts]
            for at, kept in zip(parts, mask.split(lengths), strict=True):
                for mine, left in zip(fed, self.residuals, strict=True):
                    left[at] = mine[at] * (1 - kept)
                averages[at] = torch.stack([mine[at] * kept for mine in fed]).mean(0)
        return averages

    def largest(self, values: torch.Tensor) -> list[int]:
        numel, size = len(values), values.abs().tolist()
        k = min(max(1, math.floor(self.made.density * numel)), numel)
        return sorted(range(numel), key=lambda i: (-size[i], i))[:k]

    def leader(
        self, number: int, whole: Sequence[torch.Tensor], chosen: Sequence[list[int]], at: int
    ) -> int:
        ranks = range(len(whole))
        if self.made.leader == "round_robin":
            return number % len(whole)
        norms = [float(v[places].square().sum()) for v, places in zip(whole, chosen, strict=True)]
        waited = self.waited[at] if self.made.leader == "auto" else [0] * len(whole)
        best = max(ranks, key=lambda r: (norms[r] * (1 + waited[r]), -r))
        self.waited[at] = [0 if r == best else waited[r] + 1 for r in ranks]
        return best


def whole(rank: int, step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gradients of small whole numbers: sums are exact, and there are many ties. Rank 1's are
    larger."""
    return [(2 * (1 + (rank == 1)) * g).round().to(dtype) for g in drawn(SHAPES, rank, step)]


@pytest.mark.parametrize(
    ("ranks", "density", "dtype", "leader", "scope"),
    [
        (2, 0.1, torch.float32, "round_robin", "layer"),
        (3, 0.01, torch.float16, "variance", "layer"),
        (5, 0.1, torch.bfloat16, "auto", "layer"),
        (3, 0.1, torch.float32, "auto", "model"),
        (3, 0.1, torch.float16, "round_robin", "bucket"),
        *exhaustive(
            (8, 0.01, torch.bfloat16, "round_robin", "model"),
            (2, 1, torch.float16, "auto", "bucket"),
            (5, 0.01, torch.float32, "variance", "bucket"),
            (2, 1, torch.bfloat16, "variance", "model"),
        ),
    ],
)
def test_it_is_the_algorithm(
    ranks: int, density: float, dtype: torch.dtype, leader: str, scope: str
) -> None:
    steps = 6
    data = [[whole(r, step, dtype) for r in range(ranks)] for step in range(steps)]
    made = ARTopK(density, leader, scope, "fp32")
    found = averaged(SHAPES, ErrorFeedback(made), data)
    reference = Reference(made, ranks)
    narrow = dtype != torch.float32
    eps, near_zero = max(torch.finfo(dtype).eps, 1e-6), 1e-6 * narrow
    for step in range(steps):
        for at, expected in enumerate(reference.step(step, data[step])):
            average = found[0][step][0][at].view(-1)
            if not narrow:  # else residuals have remainders that may cancel out
                assert torch.equal(average != 0, expected != 0), "other places"
            torch.testing.assert_close(average.double(), expected, rtol=eps, atol=near_zero)
            for mine, kept in zip(found, reference.residuals, strict=True):
                after = mine[step][1][at].double()
                if not narrow:
                    assert torch.equal(after, kept[at])
                else:  # also what rounding of the average lost
                    lost = expected - average.double()
                    torch.testing.assert_close(after, kept[at] + lost, rtol=0, atol=1e-5)
                    kept[at] = after
    if density == 1 and not narrow:
        assert not any(kept.any() for mine in reference.residuals for kept in mine)


def test_unless_asked_one_selection_is_over_all_parameters() -> None:
    """The paper's fused gradients: of parameters of unlike size it errs far less than one for each,
    with the same bytes."""
    shapes: list[Shape] = [(40, 50), (40, 50)]
    given = [drawn(shapes, rank, 0) for rank in range(2)]
    for gradients in given:
        gradients[0] *= 10
    errors = []
    for made in (ARTopK(0.1), ARTopK(0.1, scope="layer")):
        averages = averaged(shapes, made, [given])[0][0][0]
        pairs = zip(averages, *given, strict=True)
        errors.append(sum(float((a - (g + h) / 2).square().sum()) for a, g, h in pairs))
    assert errors[0] < 0.85 * errors[1]


def test_a_rank_of_larger_gradients_leads_and_auto_leaves_none_out() -> None:
    """Rank 2's gradients are three times as large: its share of the squared norms is 9 of 11."""

    def body(comm: Communicator) -> dict[str, list[int]]:
        found = {}
        for leader in ("variance", "auto"):
            mine = Parameters(comm, [(40, 50)], ARTopK(0.05, leader))
            led = []
            for step in range(60):
                (gradient,) = drawn([(40, 50)], comm.rank, step)
                mine.average([gradient * (3 if comm.rank == 2 else 1)])
                led.append(int(mine.members[0].metrics["leader"]))
            assert mine.members[0].metrics["skew"] > 2
            found[leader] = [led.count(rank) for rank in range(3)]
        return found

    found = as_threads(3, body)
    assert all(mine == found[0] for mine in found)
    assert found[0]["variance"] == [0, 0, 60]
    few, fewer, most = found[0]["auto"]
    assert min(few, fewer) >= 4
    assert 42 <= most <= 52  # 49 of 60 are its share


def test_auto_takes_turns_where_norms_are_equal() -> None:
    def body(comm: Communicator) -> list[int]:
        mine = Parameters(comm, [(40, 50)], ARTopK(0.05, "auto"))
        led = []
        for step in range(12):
            mine.average(drawn([(40, 50)], 0, step))
            led.append(int(mine.members[0].metrics["leader"]))
        return led

    assert as_threads(4, body) == [[0, 1, 2, 3] * 3] * 4


@pytest.mark.parametrize(
    ("ranks", "density", "values", "leader"),
    [
        (2, 0.1, "fp16", "round_robin"),
        (3, 0.01, "fp32", "variance"),
        (5, 1, "fp16", "auto"),
        *exhaustive((3, 0.1, "fp32", "round_robin")),
    ],
)
def test_bytes_are_those_of_the_formula(
    ranks: int, density: float, values: str, leader: str
) -> None:
    """Positions from the leader, k values all-reduced; norms of all ranks."""
    shape, numel = (60, 80), 4800
    made = ARTopK(density, leader, values=values)
    k = max(1, int(density * numel))
    laid = layout(selection.Positions(density))
    bits = int(laid.position.removeprefix("uint"))
    packed = selection.packed_nbytes(density, numel)
    assert 0 <= packed - 2 * laid.blocks(numel) - k * bits / 8 < 3  # at most three planes
    size = 2 if values == "fp16" else 4
    assert made.payload_bytes(shape, torch.float16) == packed + size * k

    messages = 2 * ranks * (ranks - 1)  # at most, of a round
    for sums in sent_bytes(ranks, [shape], ErrorFeedback(made), steps=ranks):
        expected = [(ranks - 1) * packed, 2 * (ranks - 1) * size * k]
        if leader != "round_robin":
            expected = [ranks * (ranks - 1) * 16, 2 * (ranks - 1) * packed, expected[1]]
        for nbytes, formula in zip(sums, expected, strict=True):
            assert formula <= nbytes <= formula + messages * (HEADER_BYTES + ALIGNMENT)
