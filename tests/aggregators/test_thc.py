"""THC: its bias, what saturates, and what that costs."""

from __future__ import annotations

import math

import pytest
import torch

from averaging import Parameters, Shape, averaged, drawn
from gradwire.aggregators import THC, Aggregator
from gradwire.aggregators.local import run_local
from gradwire.aggregators.local_codecs import Ends, Restored, Rounded
from gradwire.aggregators.thc import Numbers
from gradwire.engine import Communicator
from gradwire.lang import layout
from products import exhaustive
from ranks import as_threads


def test_sums_saturate_in_the_order_of_the_algorithm() -> None:
    """7 + 7 - 7: 7 where one rank adds all of it, 0 where 7 + 7 is sent on."""
    expected = {"sra": {7.0}, "ring": {0.0, 7.0}, "tree": {7.0}}

    def body(comm: Communicator) -> dict[str, set[float]]:
        found = {}
        for algorithm in expected:
            mine = Parameters(comm, [(4096,)], THC(rotation="none", chunk=64), algorithm=algorithm)
            given = torch.full((4096,), -7.0 if comm.rank == 2 else 7.0)
            average = mine.average([given])[0]
            assert mine.members[0].metrics["saturated_share"] == (average > 2).float().mean()
            found[algorithm] = set((3 * average).round().tolist())
        return found

    assert as_threads(3, body) == [expected] * 3


@pytest.mark.parametrize("how", ["partial", "none", *exhaustive("full")])
def test_it_is_unbiased_where_nothing_saturates(how: str) -> None:
    """z-tests: over 150 steps of 180 values; and, unrotated, over 10^5 equal values in one."""
    steps, shape = 150, (12, 15)

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mine = Parameters(comm, [shape], THC(5, 4, how, 16, saturate=False))
        given = drawn([shape], comm.rank, 0)
        mean = sum(drawn([shape], rank, 0)[0].double() for rank in range(2)) / 2
        errors = torch.stack([mine.average(given)[0].double() - mean for _ in range(steps)])
        many = Parameters(comm, [(102400,)], THC(5, 4, how, 128))
        alike = torch.full((102400,), 0.3)
        alike[::128] = -1.0
        same = many.average([alike])[0].view(-1, 128)[:, 1:].double()
        return errors.mean(0), errors.std(0), same

    mean, deviation, alike = as_threads(2, body)[0]
    z = mean / (deviation / math.sqrt(steps)).clamp(min=1e-7)
    assert z.abs().max() < 5
    assert z.square().mean() < 1.4
    if how == "none":
        assert abs(alike.mean() - 0.3) < 5 * alike.std() / math.sqrt(alike.numel())


def heavy(shape: Shape, rank: int, step: int = 0) -> torch.Tensor:
    """Heavy tails, rows of different size, and a part that all ranks share."""
    own, shared = drawn([shape], rank, step)[0], drawn([shape], 100, step)[0]
    rows = drawn([(shape[0], 1)], 200, 0)[0].exp()
    return rows * (own * own.abs() + 0.5 * shared * shared.abs())


def error_of(aggregator: Aggregator, ranks: int = 4) -> float:
    """NMSE of one average of heavy gradients."""
    given = [[heavy((300, 400), rank)] for rank in range(ranks)]
    mean = sum(mine[0].double() for mine in given) / ranks
    average = averaged([(300, 400)], aggregator, [given])[0][0][0][0].double()
    return float((average - mean).square().sum() / mean.square().sum())


def test_saturation_and_partial_rotation_cost_little() -> None:
    """Against the sum in 8 bits, and the full rotation, on synthetic gradients."""
    wide, five, four = (error_of(THC(bits, 4)) for bits in (8, 5, 4))
    full, none = (error_of(THC(8, 4, how)) for how in ("full", "none"))
    assert five < 1.1 * wide
    assert wide < four < 3 * wide
    assert wide < 1.35 * full
    assert none > 3 * wide


def test_a_width_that_suffices_is_accepted() -> None:
    """What test_refused_aggregators.py has refused for its ranks is fine where sums may saturate,
    or for one rank; and so is what its messages name."""
    for bits, code in ((5, 4), (4, 4), (8, 4), (8, 3), (8, 2)):
        THC(bits, code).check_ranks(128)
        THC(bits, code, saturate=False).check_ranks(1)
    for ranks, bits, code in ((3, 6, 4), (4, 6, 4), (19, 8, 3), (127, 8, 2)):
        THC(bits, code, saturate=False).check_ranks(ranks)


def test_the_memory_of_numbers_is_a_payload() -> None:
    for numel in (1, 15, 16, 17, 100):
        made = Numbers(torch.zeros(numel), 16)
        for codec in (Rounded(16, 7, True), Restored(16, 7, True)):
            assert layout(codec).nbytes(numel) == made.memory.numel()
        made.numbers.copy_(torch.arange(numel) % 7)
        made.ranges.fill_(14)
        found, ends = torch.empty(numel), torch.empty(1)
        run_local(Restored(16, 7, False), "decode", [found], [made.memory], None, 0.5)
        torch.testing.assert_close(found, made.numbers)
        run_local(Ends(5), "encode", [made.numbers], [ends])
        assert ends.item() == (made.numbers >= 5).sum()
