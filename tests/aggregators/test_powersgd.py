"""PowerSGD: against the algorithm in float64, and its bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from itertools import product as product_of
from typing import Any

import pytest
import torch

import gradwire as gw
from averaging import Parameters, Shape, drawn
from gradwire.aggregators import ErrorFeedback, PowerSGD, powersgd, registry
from gradwire.engine import Communicator
from gradwire.lang import lowrank
from gradwire.lang.lowrank import Compiled, Eager, Factored
from gradwire.planner import Rules, make_plan
from products import one_in
from ranks import as_processes, as_threads

MATRICES: list[Shape] = [(12, 20), (33, 17), (12, 20), (8, 3, 3, 3), (64, 7)]
REST: list[Shape] = [(50,), (2, 3), (), (0,), (5, 0)]


def compresses(rank: int, shape: Shape) -> bool:
    columns = math.prod(shape[1:])
    return len(shape) > 1 and rank * (shape[0] + columns) < shape[0] * columns


def reference(
    shapes: Sequence[Shape],
    bases: dict[int, torch.Tensor],
    residuals: Sequence[Sequence[torch.Tensor]],
    gradients: Sequence[Sequence[torch.Tensor]],
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """One step of the algorithm in float64, all ranks at once.

    Args:
        bases: Q of each compressed parameter, [m, r].
        residuals, gradients: of each rank, by parameter.

    Returns:
        The averages; and each rank's residuals, all 1-D.
    """
    averages = []
    kept: list[list[torch.Tensor]] = [[] for _ in gradients]
    for at, shape in enumerate(shapes):
        wanted = [
            g[at].double().view(-1) + e[at].double()
            for g, e in zip(gradients, residuals, strict=True)
        ]
        sent = wanted
        if at in bases:
            matrices = [p.view(shape[0], -1) for p in wanted]
            p = gram_schmidt(sum(m @ bases[at].double() for m in matrices))
            sent = [(p @ (p.T @ m)).view(-1) for m in matrices]
        averages.append(torch.stack(sent).mean(0))
        for mine, p, s in zip(kept, wanted, sent, strict=True):
            mine.append(p - s)
    return averages, kept


def gram_schmidt(matrix: torch.Tensor) -> torch.Tensor:
    columns: list[torch.Tensor] = []
    for column in matrix.T:
        for known in columns:
            column = column - (known @ column) * known
        columns.append(column / column.norm())
    return torch.stack(columns, 1)


@pytest.mark.parametrize(
    ("ranks", "rank", "dtype", "orthogonal"),
    [
        (2, 1, torch.float32, "cholesky"),
        (3, 2, torch.float16, "qr"),
        (5, 4, torch.bfloat16, "cholesky"),
        (8, 2, torch.float32, "cholesky"),
        (3, 4, torch.float32, "qr"),
        (2, 1, torch.bfloat16, "qr"),
        (5, 1, torch.float16, "cholesky"),
    ],
)
def test_it_is_the_algorithm(ranks: int, rank: int, dtype: torch.dtype, orthogonal: str) -> None:
    """Each step starts from the previous state: rounding errors grow over many."""
    shapes, steps = [*MATRICES, *REST], 5
    data = [[drawn(shapes, r, step, dtype) for r in range(ranks)] for step in range(steps)]

    def body(comm: Communicator) -> list[Any]:
        aggregator = ErrorFeedback(PowerSGD(rank, orthogonal=orthogonal))
        mine, found = Parameters(comm, shapes, aggregator), []
        for step in range(steps):
            averages = mine.average(data[step][comm.rank])
            found.append((averages, mine.states(), mine.bases()))
        return found

    found = as_threads(ranks, body)
    for step in range(1, steps):
        bases = {at: basis for at, basis in enumerate(found[0][step - 1][2]) if basis is not None}
        assert sorted(bases) == [i for i, s in enumerate(shapes) if compresses(rank, s)]
        before = [mine[step - 1][1] for mine in found]
        expected, residuals = reference(shapes, bases, before, data[step])
        tolerance = max(1e-5, 2 * torch.finfo(dtype).eps)
        for at in range(len(shapes)):
            average = found[0][step][0][at]
            assert average.dtype == dtype
            assert all(torch.equal(mine[step][0][at], average) for mine in found)
            close(average.view(-1), expected[at], tolerance)
            for mine, kept in zip(found, residuals, strict=True):
                if at in bases or dtype != torch.float32:  # also what rounding of the average lost
                    kept[at] += expected[at] - average.view(-1).double()
                close(mine[step][1][at], kept[at], 1e-5)
                if at not in bases and dtype == torch.float32:
                    assert not mine[step][1][at].any(), "what is sent whole leaves nothing"


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Equal up to a share of the largest value."""
    if found.numel():
        off = (found.double() - expected).abs().max()
        assert off <= tolerance * max(1.0, float(expected.abs().max())), float(off)


def test_one_rank_alone_has_its_average() -> None:
    def body(comm: Communicator) -> tuple[list[torch.Tensor], list[Any]]:
        mine = Parameters(comm, MATRICES, PowerSGD(2))
        return mine.average(drawn(MATRICES, 0, 0)), mine.outcomes

    averages, outcomes = as_threads(1, body)[0]
    assert all(map(torch.equal, averages, drawn(MATRICES, 0, 0)))
    assert outcomes == [[]]


def test_layers_of_a_bucket_share_two_collectives_and_vectors_alone_one() -> None:
    def body(comm: Communicator) -> list[list[int]]:
        found = []
        for layers in (1, 2, 30, 0):
            shapes = [s for _ in range(layers) for s in ((24, 16), (9,), (16, 12))] or REST
            mine = Parameters(comm, shapes, ErrorFeedback(PowerSGD(2)))
            for step in range(2):
                mine.average(drawn(shapes, comm.rank, step))
            found.append([len(outcomes) for outcomes in mine.outcomes])
        return found

    assert as_threads(2, body) == [[[2, 2]] * 3 + [[1, 1]]] * 2


def test_the_payload_is_as_large_as_it_says() -> None:
    for shape in (*MATRICES, *REST):
        columns, numel = math.prod(shape[1:]), math.prod(shape)
        expected = 4 * 3 * (shape[0] + columns) if compresses(3, shape) else 4 * numel
        assert PowerSGD(3).payload_bytes(shape, torch.float32) == expected


def test_residuals_stay_small_where_ranks_see_unlike_data() -> None:
    """Each rank has its own constant gradient, of a rank that PowerSGD can express."""
    made = torch.Generator().manual_seed(0)
    own = [torch.outer(torch.randn(12, generator=made), torch.randn(20, generator=made))
           for _ in range(2)]  # fmt: skip

    def body(comm: Communicator) -> float:
        mine = Parameters(comm, [(12, 20), (30,)], ErrorFeedback(PowerSGD(2)))
        for _ in range(100):
            mine.average([own[comm.rank], torch.full((30,), float(comm.rank))])
        return max(float(kept.norm()) for kept in mine.states())

    assert max(as_threads(2, body)) < 1e-2 * float(own[0].norm())


@pytest.mark.parametrize(
    ("where", "bad"), [((12, 20), torch.inf), ((12, 20), torch.nan), ((50,), -torch.inf)], ids=str
)
def test_what_is_not_finite_travels_and_leaves_state_as_it_was(where: Shape, bad: float) -> None:
    shapes = [(12, 20), (33, 17), (50,)]
    at = shapes.index(where)

    def body(comm: Communicator) -> None:
        mine = Parameters(comm, shapes, ErrorFeedback(PowerSGD(2)))
        for step in range(2):
            mine.average(drawn(shapes, comm.rank, step))
        mine.members[2].state["residual"] += 1.0  # as another aggregator may have left it
        before, bases = mine.states(), mine.bases()
        gradients = drawn(shapes, comm.rank, 2)
        if comm.rank == 1:
            gradients[at].view(-1)[7] = bad
        averages = mine.average(gradients)
        after, bases_after = mine.states(), mine.bases()
        for i in range(len(shapes)):
            assert averages[i].isfinite().all() == (i != at)
            assert torch.equal(before[i], after[i]) == (i == at)
            assert i == 2 or torch.equal(bases[i], bases_after[i]) == (i == at)

    as_threads(3, body)


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
            found.append([*averages, *mine.states(), *[b for b in mine.bases() if b is not None]])
        return found

    for mine in as_threads(2, body):
        for other in mine[1:]:
            assert all(map(torch.equal, mine[0], other))


@pytest.mark.multiprocess
@pytest.mark.parametrize(("rank", "feedback"), one_in(6, product_of([2, 1, 5], [True, False])))
def test_layers_do_not_depend_on_their_company(rank: int, feedback: bool) -> None:
    """A matrix library's bits depend on a matrix's address and on the size of the batch.

    And on how many threads they have, which torch keeps thread by thread: the engine's would have
    what was set when they began. So this is a process of its own, in which all have one.
    """
    as_processes(1, company, rank, feedback)


def test_a_gradient_of_zeros_is_no_end() -> None:
    """Afterwards Q is zero, and P's columns are arbitrary: the next steps recover the matrix."""
    matrix = drawn([(12, 20)], 0, 0)[0]
    matrix = matrix[:, :2] @ matrix[:2]

    def body(comm: Communicator) -> list[torch.Tensor]:
        mine = Parameters(comm, [(12, 20)], ErrorFeedback(PowerSGD(2)))
        gradients = [torch.zeros(12, 20), matrix, matrix, matrix]
        return [mine.average([g])[0] for g in gradients]

    zero, *_, last = as_threads(2, body)[0]
    assert not zero.any()
    torch.testing.assert_close(last, matrix, rtol=1e-2, atol=1e-2)


def test_options_are_checked() -> None:
    wrong: dict[str, list[Any]] = {
        "rank": [0, -1, 1.5, True, "2", None],
        "warm": [0, 1, None, "false"],
        "orthogonal": ["lu", None, True],
    }
    for option, value in ((option, value) for option, of in wrong.items() for value in of):
        with pytest.raises(gw.ConfigError, match=f"PowerSGD: {option}={value!r} must be "):
            PowerSGD(**{option: value})


def test_a_rank_above_a_matrix_is_dense_or_refused() -> None:
    """Dense where the rank is the model's; refused where it is the parameter's own, or where it
    leaves nothing to compress."""
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
    with pytest.raises(gw.ConfigError, match=r"small: rank=5 .* 3 x 8: the largest .* is 2"):
        make_plan(parameters, rules.changed(codecs={"s*": "powersgd:rank=5"}), 2)
    with pytest.raises(gw.ConfigError, match="no parameter can be compressed; parameter small"):
        make_plan(parameters, Rules().changed(codec="powersgd", options={"rank": 50}), 2)
    with pytest.raises(gw.ConfigError, match=r"small: rank=3 .* 3 x 8: the largest .* is 2"):
        make_plan(parameters, rules.changed(codecs={"small": "powersgd:rank=3"}), 2)
    thin = [("thin", torch.zeros(1, 9)), *parameters]
    with pytest.raises(gw.ConfigError, match=r"thin: rank=2 .* 1 x 9: no rank shrinks it"):
        make_plan(thin, rules.changed(codecs={"thin": "powersgd:rank=2"}), 2)


def test_a_rank_that_shrinks_no_matrix_is_refused() -> None:
    for rank, shape in ((2, (2, 2)), (1, (1, 40)), (4, (8, 4)), (1, (0, 4))):
        check_refused(rank, shape)


def check_refused(rank: int, shape: Shape) -> None:
    rules = Rules().changed(codec="powersgd", options={"rank": rank})
    match = f"parameter w: rank={rank} does not shrink a matrix of {shape[0]} x {shape[1]}"
    with pytest.raises(gw.ConfigError, match=match):
        make_plan([("w", torch.zeros(shape)), ("bias", torch.zeros(90))], rules, 2)
    plan = make_plan([("w", torch.zeros(shape)), ("large", torch.zeros(40, 30))], rules, 2)
    assert plan.parameters[0].aggregator.payload_bytes(shape, torch.float32) == 4 * math.prod(shape)


def test_options_are_read_from_a_name() -> None:
    made = registry.get("powersgd:rank=3:warm=false:orthogonal=qr")
    assert made == PowerSGD(3, warm=False, orthogonal="qr")
    assert str(made) == "powersgd(rank=3, fresh start, qr)"


def test_a_fresh_start_is_drawn_alike_and_anew() -> None:
    """No state but the residual; nothing is lost; each step has another subspace."""
    ranks, aggregator = 3, ErrorFeedback(PowerSGD(2, warm=False))
    assert list(aggregator.states((12, 20))) == ["residual"]

    def body(comm: Communicator) -> list[Any]:
        mine, found = Parameters(comm, [(12, 20)], aggregator), []
        for _ in range(3):
            before = mine.states()[0]
            average = mine.average([torch.eye(12, 20) * (1 + comm.rank)])[0]
            found.append((before, average, mine.states()[0]))
        return found

    found = as_threads(ranks, body)
    for step in range(3):
        average = found[0][step][1]
        assert all(torch.equal(mine[step][1], average) for mine in found)
        gradients = torch.eye(12, 20) * sum(range(1, ranks + 1))
        before, after = (sum(mine[step][i].view(12, 20) for mine in found) for i in (0, 2))
        torch.testing.assert_close(gradients + before, ranks * average + after)
    spaces = [mine[1].svd().U[:, :2] for mine in found[0]]
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


def test_the_scale_of_gradients_changes_no_digit() -> None:
    """P of a warm start has the square of a gradient's size: GradScaler's must not overflow it."""

    def body(comm: Communicator) -> list[torch.Tensor]:
        found = []
        for factor in (1.0, 2.0**-40, 2.0**16, 2.0**60):
            mine = Parameters(comm, [(12, 20), (33, 17)], ErrorFeedback(PowerSGD(2)))
            for step in range(4):
                gradients = [g * factor for g in drawn([(12, 20), (33, 17)], comm.rank, step)]
                averages = mine.average(gradients)
            found.append(torch.cat([a.view(-1) / factor for a in [*averages, *mine.states()]]))
        return found

    for plain, *others in as_threads(2, body):
        assert all(torch.equal(plain, scaled) for scaled in others)


def test_ranks_with_and_without_a_compiler_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = cycle([Compiled, Eager, Eager])

    def either(matrices: Sequence[Factored]) -> Any:
        return next(ways)(matrices)

    monkeypatch.setattr(powersgd, "lowrank", either)

    def body(comm: Communicator) -> list[torch.Tensor]:
        mine, found = Parameters(comm, MATRICES, ErrorFeedback(PowerSGD(3))), []
        for step in range(4):
            found += mine.average(drawn(MATRICES, comm.rank, step))
        return [*found, *(basis for basis in mine.bases() if basis is not None)]

    first, *others = as_threads(3, body)
    for other in others:
        assert all(map(torch.equal, first, other))


def test_a_missing_compiler_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowrank, "_missing", lambda: "no compiler, for a test of PowerSGD")
    shapes: list[Shape] = [(12, 20)]

    def body(comm: Communicator) -> list[torch.Tensor]:
        mine = Parameters(comm, shapes, ErrorFeedback(PowerSGD(2)))
        return mine.average(drawn(shapes, comm.rank, 0)) + mine.average(drawn(shapes, comm.rank, 1))

    with pytest.warns(RuntimeWarning, match="no compiler, for a test of PowerSGD") as told:
        first, other = as_threads(2, body)
    assert len(told) == 1
    assert all(map(torch.equal, first, other))
