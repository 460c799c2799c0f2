"""PowerSGD beside test_references.py: what residuals come to, zeros, and its company."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from itertools import product as product_of
from typing import Any

import pytest
import torch

from averaging import Parameters, Shape, averaged, drawn
from gradwire.aggregators import ErrorFeedback, PowerSGD, powersgd, registry
from gradwire.engine import Communicator
from gradwire.lang import lowrank
from gradwire.lang.lowrank import Compiled, Eager, Factored
from gradwire.planner import Rules, make_plan
from products import one_in
from ranks import as_processes, as_threads

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
    assert str(made) == "powersgd(rank=3, fresh start, qr)"


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
