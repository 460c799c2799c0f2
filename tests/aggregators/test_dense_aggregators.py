"""Aggregators whose averages have all values: THC's bias, what saturates, and what that costs;
PowerSGD's residuals, zeros and company."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from itertools import product as product_of
from typing import Any

import pytest
import torch

from averaging import Parameters, Shape, averaged, drawn
from gradwire.aggregators import THC, Aggregator, ErrorFeedback, PowerSGD, powersgd, registry
from gradwire.aggregators.local import run_local
from gradwire.aggregators.local_codecs import Ends, Restored, Rounded
from gradwire.aggregators.thc import Numbers
from gradwire.engine import Communicator
from gradwire.lang import layout, lowrank
from gradwire.lang.lowrank import Compiled, Eager, Factored
from gradwire.planner import Rules, make_plan
from products import exhaustive, one_in
from ranks import as_processes, as_threads


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


MATRICES: list[Shape] = [(12, 20), (33, 17), (12, 20), (8, 3, 3, 3), (64, 7)]


def test_residuals_stay_small_where_ranks_see_unlike_data() -> None:
    """Each rank has its own constant gradient, of a rank that PowerSGD can express."""
    made = torch.Generator().manual_seed(0)
    own = [torch.outer(torch.randn(12, generator=made), torch.randn(20, generator=made))
           for _ in range(2)]  # fmt: skip

    data = [[mine, torch.full((30,), float(rank))] for rank, mine in enumerate(own)]
    for mine in averaged([(12, 20), (30,)], ErrorFeedback(PowerSGD(2)), [data] * 100):
        assert all(kept.norm() < 1e-2 * own[0].norm() for kept in mine[-1][1])


def company(_: int, rank: int, feedback: bool) -> None:
    shapes = [(7, 131), (33, 5), (7, 131), (129, 60), (7, 131), (33, 5), (64, 64)]
    ways: list[Any] = [
        [range(7)], [[i] for i in range(7)], [[0, 1, 4], [2, 3, 5, 6]], [[6, 5, 2], [4, 3, 0, 1]],
    ]  # fmt: skip

    aggregator = ErrorFeedback(PowerSGD(rank)) if feedback else PowerSGD(rank)

    def body(comm: Communicator) -> list[list[torch.Tensor]]:
        found = []
        for scopes in ways:
            mine = Parameters(comm, shapes, aggregator)
            for step in range(3):
                averages = mine.average(drawn(shapes, comm.rank, step), scopes)
            found.append([*averages, *mine.states(), *mine.states("basis")])
        return found

    for mine in as_threads(2, body):
        for other in mine[1:]:
            assert all(map(torch.equal, mine[0], other))


@pytest.mark.multiprocess
@pytest.mark.parametrize(("width", "feedback"), one_in(6, product_of([2, 1, 5], [True, False])))
def test_layers_do_not_depend_on_their_company(width: int, feedback: bool) -> None:
    """A matrix library's bits depend on a matrix's address and on the size of the batch.

    And on how many threads they have, which torch keeps thread by thread: the engine's would have
    what was set when they began. So this is a process of its own, in which all have one.
    """
    as_processes(1, company, width, feedback)


def test_a_gradient_of_zeros_is_no_end() -> None:
    """Afterwards Q is zero, and P's columns are arbitrary: the next steps recover the matrix."""
    matrix = drawn([(12, 20)], 0, 0)[0]
    matrix = matrix[:, :2] @ matrix[:2]

    data = [[[gradient]] * 2 for gradient in (torch.zeros(12, 20), matrix, matrix, matrix)]
    found = averaged([(12, 20)], ErrorFeedback(PowerSGD(2)), data)[0]
    assert not found[0][0][0].any()
    torch.testing.assert_close(found[-1][0][0], matrix, rtol=1e-2, atol=1e-2)


def test_a_rank_above_a_matrix_is_dense_where_it_is_the_models() -> None:
    """test_refused_aggregators.py has what is refused."""
    parameters = [("small", torch.zeros(3, 8)), ("large", torch.zeros(40, 30))]

    def payload(rules: Rules) -> list[int]:
        return [
            p.aggregator.payload_bytes(p.shape, p.dtype)
            for p in make_plan(parameters, rules, 2).parameters
        ]

    rules = Rules().changed(codec="powersgd", options={"rank": 5})
    assert payload(rules) == [4 * 3 * 8, 4 * 5 * 70]
    own = rules.changed(codecs={"small": "powersgd:rank=2", "large": "powersgd:rank=3"})
    assert payload(own) == [4 * 2 * 11, 4 * 3 * 70]
    for rank, shape in ((2, (2, 2)), (1, (1, 40)), (4, (8, 4)), (1, (0, 4))):
        plan = make_plan(
            [("w", torch.zeros(shape)), ("large", torch.zeros(40, 30))],
            Rules().changed(codec="powersgd", options={"rank": rank}), 2,
        )  # fmt: skip
        sent = plan.parameters[0].aggregator.payload_bytes(shape, torch.float32)
        assert sent == 4 * math.prod(shape)


def test_options_are_read_from_a_name() -> None:
    made = registry.get("powersgd:rank=3:warm=false:orthogonal=qr")
    assert made == PowerSGD(3, warm=False, orthogonal="qr")


def test_a_fresh_start_is_drawn_alike_and_anew() -> None:
    """No state but the residual; nothing is lost; each step has another subspace."""
    ranks, aggregator = 3, ErrorFeedback(PowerSGD(2, warm=False))
    assert list(aggregator.states((12, 20))) == ["residual"]

    given = [[torch.eye(12, 20) * (1 + rank)] for rank in range(ranks)]
    found, before = averaged([(12, 20)], aggregator, [given] * 3), torch.zeros(12, 20)
    for step in range(3):
        average = found[0][step][0][0]
        after = sum(mine[step][1][0].view(12, 20) for mine in found)
        gradients = torch.eye(12, 20) * sum(range(1, ranks + 1))
        torch.testing.assert_close(gradients + before, ranks * average + after)
        before = after
    spaces = [averages[0].svd().U[:, :2] for averages, _ in found[0]]
    assert (spaces[0].T @ spaces[1]).svd().S.min() < 0.99


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_average_that_its_dtype_cannot_hold_saturates(dtype: torch.dtype) -> None:
    """And the residual keeps the rest, so that the next steps send it."""
    largest = torch.finfo(dtype).max
    gradients = torch.full((12, 20), largest / 2, dtype=dtype)

    def body(comm: Communicator) -> list[torch.Tensor]:
        mine = Parameters(comm, [(12, 20)], ErrorFeedback(PowerSGD(1)))
        mine.average([gradients])
        mine.members[0].state["residual"] += largest * 0.9
        before = mine.states()[0]
        average = mine.average([gradients])[0]
        return [before, average, mine.states()[0], mine.average([torch.zeros_like(gradients)])[0]]

    if dtype == torch.bfloat16:  # whose largest value is about that of fp32, whose bound is lower
        assert not as_threads(2, body)[0][1].isfinite().all()
        return
    for before, average, after, following in as_threads(2, body):
        assert torch.equal(average, torch.full_like(average, largest))
        wanted = gradients.float().view(-1) + before
        torch.testing.assert_close(average.float().view(-1) + after, wanted, rtol=1e-5, atol=0)
        torch.testing.assert_close(following.float().view(-1), after, rtol=1e-3, atol=0)


def test_ranks_with_and_without_a_compiler_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = cycle([Compiled, Eager, Eager])

    def either(matrices: Sequence[Factored]) -> Any:
        return next(ways)(matrices)

    monkeypatch.setattr(powersgd, "lowrank", either)

    data = [[drawn(MATRICES, rank, step) for rank in range(3)] for step in range(4)]
    first, *others = averaged(MATRICES, ErrorFeedback(PowerSGD(3)), data, "basis")
    for other in others:
        assert all(map(torch.equal, first[-1][2], other[-1][2]))


def test_a_missing_compiler_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowrank, "_missing", lambda: "no compiler, for a test of PowerSGD")
    data = [[drawn([(12, 20)], rank, step) for rank in range(2)] for step in range(2)]
    with pytest.warns(RuntimeWarning, match="no compiler, for a test of PowerSGD") as told:
        averaged([(12, 20)], ErrorFeedback(PowerSGD(2)), data)
    assert len(told) == 1
