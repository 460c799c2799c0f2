"""PowerSGD's arithmetic: against float64, and compiled and eager code against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product as product_of

import pytest
import torch

from gradwire.lang.lowrank import Compiled, Eager, Factored, product

Made = Callable[[Sequence[Factored]], Eager]
WAYS: dict[str, Made] = {"compiled": Compiled, "eager": Eager}
SIDES = [(3, 9, 1), (12, 20, 2), (33, 17, 4), (64, 7, 3), (130, 64, 5), (66, 131, 33)]


def drawn(n: int, m: int, r: int, residual: bool = True, seed: int = 0) -> Factored:
    made = torch.Generator().manual_seed(seed)
    values, kept, basis = (torch.randn(shape, generator=made) for shape in ((n, m), (n, m), (m, r)))
    start, left, own, right = (torch.zeros(shape) for shape in ((r, m), (r, n), (r, m), (r, m)))
    return Factored(values, kept if residual else None, basis, start, left, own, right)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.double() - expected).abs().max() <= 3e-6 * expected.abs().max()


@pytest.mark.parametrize("way", WAYS)
def test_each_step_is_its_product(way: str) -> None:
    for sides, cheap, residual in product_of(SIDES, [False, True], [True, False]):
        a = drawn(*sides, residual=residual)
        before, kept = a.values.double(), 0.0 if a.residual is None else a.residual.double()
        steps = WAYS[way]([a])
        steps.left()
        matrix = a.values.double()
        near(a.values, before + kept)
        scales = a.start.abs().amax(1)
        assert ((scales >= 1) & (scales < 2)).all()
        assert set((a.start / a.basis.mT).log2().frac().abs().unique().tolist()) == {0.0}
        near(a.left, a.start.double() @ matrix.mT)
        steps.columns(cheap)
        near(a.left.double() @ a.left.double().mT, torch.eye(sides[2]).double())
        steps.right()
        near(a.own, a.left.double() @ matrix)
        assert torch.equal(a.own, a.right)
        a.right.mul_(0.5)  # as an average over ranks
        assert steps.finish() == [True]
        near(a.values, a.left.double().mT @ a.right.double())
        assert torch.equal(a.basis, a.right.mT)
        if a.residual is not None:
            error = a.residual.double() - (matrix - a.left.double().mT @ a.own.double())
            assert error.abs().max() <= 3e-6 * matrix.abs().max()


def test_both_ways_have_the_same_columns_and_averages() -> None:
    """And so in any company, on any number of threads."""
    for sides, cheap in product_of(SIDES, [False, True]):
        found = columns_and_averages(sides, cheap)
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other)), (sides, cheap)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Tests set their number."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def columns_and_averages(sides: tuple[int, int, int], cheap: bool) -> list[list[torch.Tensor]]:
    found = []
    company = [drawn(*SIDES[at], seed=at + 1) for at in (1, 3, 1)]
    for way, others, count in (("eager", [], 1), ("compiled", company, 3), ("compiled", [], 1)):
        torch.set_num_threads(count)
        a = drawn(*sides)
        steps = WAYS[way]([*others, a])
        a.left.normal_(generator=torch.Generator().manual_seed(5))
        steps.columns(cheap)
        for right in (a.own, a.right):
            right.normal_(generator=torch.Generator().manual_seed(6))
        assert steps.finish()[-1]
        assert a.residual is not None
        found.append([a.left, a.values, a.residual, a.basis])
    return found


def test_products_of_a_rank_do_not_depend_on_company_or_threads() -> None:
    found = []
    for count, others in ((1, 0), (2, 1), (5, 1), (2, 7), (5, 7)):
        torch.set_num_threads(count)
        a = drawn(130, 200, 5)
        steps = Compiled([*(drawn(66, 131, 3) for _ in range(others)), a])
        steps.left()
        steps.columns(False)
        steps.right()
        found.append([a.values, a.left, a.own])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


KINDS = ["drawn", "one column", "zeros", "nearly alike", "large", "tiny", "last is a sum"]


@pytest.mark.parametrize("way", WAYS)
def test_columns_are_orthonormal_and_span_the_matrix(way: str) -> None:
    """Also for a matrix of less than full rank."""
    for kind, sides, cheap in product_of(KINDS, [(3, 3), (50, 4), (1000, 7)], [False, True]):
        n, r = sides
        a = drawn(n, 9, r)
        matrix = torch.randn(r, n, generator=torch.Generator().manual_seed(n))
        if kind == "one column":
            matrix = matrix[:1] * torch.arange(1.0, r + 1)[:, None]
        elif kind == "nearly alike":
            matrix = matrix[:1] + 1e-6 * matrix
        elif kind == "last is a sum":
            matrix[-1] = matrix[:-1].sum(0)
        matrix = matrix * {"zeros": 0.0, "large": 1e30, "tiny": 1e-30}.get(kind, 1.0)
        a.left.copy_(matrix)
        bad = drawn(n, 9, r)
        bad.left.fill_(1.0)[0, 1] = torch.inf
        WAYS[way]([bad, a]).columns(cheap)
        assert bad.left.isnan().all()
        q = a.left.double()
        torch.testing.assert_close(q @ q.T, torch.eye(r).double(), rtol=0, atol=1e-5)
        rest = matrix.double() - matrix.double() @ q.T @ q
        assert rest.norm() <= 1e-6 * matrix.double().norm()


def test_an_average_that_is_not_finite_changes_no_state() -> None:
    """A bound above what fp32 holds counts as not finite."""
    for way, bad in product_of(WAYS, [torch.inf, torch.nan, 3e38]):
        a, fine = drawn(12, 20, 2), drawn(12, 20, 2)
        steps = WAYS[way]([a, fine])
        steps.left()
        steps.columns(False)
        steps.right()
        assert a.residual is not None
        residual, basis = a.residual.clone(), a.basis.clone()
        a.right[1, 3] = bad
        assert steps.finish() == [False, True]
        assert a.values.isnan().all()
        assert fine.values.isfinite().all()
        assert torch.equal(a.residual, residual)
        assert torch.equal(a.basis, basis)


def test_the_scale_of_the_basis_changes_nothing() -> None:
    for way, power in product_of(WAYS, [-130, -60, 0, 60, 120]):
        found = []
        for factor in (1.0, 2.0**power):
            a = drawn(12, 20, 2)
            # exact as a subnormal
            a.basis.div_(a.basis.abs().max()).mul_(64).round_().mul_(factor)
            WAYS[way]([a]).left()
            found.append(a.left)
        assert torch.equal(*found), (way, power)


def test_a_product_is_a_sum_in_order() -> None:
    left, right = torch.tensor([[1e8], [1.0], [-1e8]]), torch.ones(3, 1)
    assert float(product(left, right)) == 0.0
    assert float(product(left[[0, 2, 1]], right)) == 1.0
