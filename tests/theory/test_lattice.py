"""Lemmas 4, 5 and 15 of THESIS C.5, for the operators as they are defined."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from lattice import Mean, flipped, mean, nearest, shifted, shifts, unshifted
from torch import Generator, Tensor

DRAWS = 20_000
STEP = 0.4
# on the lattice without a shift, between its points, and beyond them
X = torch.tensor([0.0, 0.4, 0.1, 0.2, -0.33, 7.7, -1e-3, 3.3], dtype=torch.float64)
Operator = Callable[[Tensor, float, Generator], Tensor]


def draws(operator: Operator, step: float = STEP, seed: int = 0) -> Tensor:
    return operator(X.expand(DRAWS, -1), step, Generator().manual_seed(seed))


def fraction(x: Tensor) -> Tensor:
    return x - x.floor()


def of_norms(samples: Tensor) -> Mean:
    return mean(samples.square().sum(-1))


# Lemma 5 ----------------------------------------------------------------------------------------


def test_lemma_5_unbiased() -> None:
    """E Q(v) = v for every v and step, over the shift (Lemma 15: over the coins)."""
    for operator in (shifted, unshifted, flipped):
        assert mean(draws(operator)).within(X), operator


def test_definition_1_errs_uniformly_whatever_the_value() -> None:
    """E |Q(v) - v|^2 = n step^2 / 12 for every v, each error uniform in half a step to either side.

    This stands in the place of Lemma 5's second line: see the next test.
    """
    error = draws(shifted) - X
    assert bool((error.abs() <= STEP / 2 * (1 + 1e-9)).all())
    assert of_norms(error).within(len(X) * STEP**2 / 12)
    assert mean(error.square()).within(STEP**2 / 12)
    assert mean(error.pow(4)).within(STEP**4 / 80)


@pytest.mark.parametrize("operator", [unshifted, flipped])
def test_lemma_5_squared_error_holds_without_the_shift(operator: Operator) -> None:
    """E |Q(v) - v|^2 = step^2 sum_i {v_i/step} (1 - {v_i/step}), {} the fractional part.

    Lemma 5 says so of Definition 1, but its proof leaves out that r is added again. It is true of
    the operators that round to step Z, and of Lemma 15's. For Definition 1 it is wrong: too small
    next to the lattice's points and too large between them. There the error of a vector of zeros is
    not 0, so C.5.3's bound step |v|_1 does not hold for Definition 1 either.
    """
    fractional = fraction(X / STEP)
    formula = STEP**2 * fractional * (1 - fractional)
    assert mean((draws(operator) - X).square()).within(formula)
    assert of_norms(draws(operator) - X).at_most(STEP * X.abs().sum())

    error = mean((draws(shifted) - X).square())
    assert error[:2].above(formula[:2])  # on the lattice
    assert Mean(-error.value[3:4], error.error[3:4]).above(-formula[3:4])  # half a step away
    zero = torch.zeros(DRAWS, 8, dtype=torch.float64)
    assert of_norms(shifted(zero, STEP, Generator().manual_seed(1))).above(0.0)


def test_lemma_5_sparsity() -> None:
    """E |Q_r(v) - r 1|_0 <= |v|_1 / step; coordinate by coordinate it is min(1, |v_i| / step)."""
    for operator in (unshifted, flipped):
        steps = draws(operator) / STEP
        nonzero = (steps.round() != 0).double()
        assert mean(nonzero).within((X.abs() / STEP).clamp(max=1.0))
        assert mean(nonzero.sum(-1)).at_most(X.abs().sum() / STEP)


# Lemma 4 ----------------------------------------------------------------------------------------


def lattice_errors(coarse: float, arbitrary: bool = False) -> Mean:
    """Squared errors of a point of coarse Z^n + r 1 for each of DRAWS shifts r."""
    generator = Generator().manual_seed(2)
    x = X.expand(DRAWS, -1)
    points = nearest(x, coarse, shifts(x, coarse, generator))
    if arbitrary:
        points = points + coarse * torch.randint(-1, 2, points.shape, generator=generator)
    return mean((points - X).square())


def test_lemma_4() -> None:
    """E |Q_fine(x) - x|^2 <= fine/coarse E_r |x*_r - x|^2, coordinate by coordinate.

    Conditions: coarse/fine is an integer above 1; x*_r is any point of coarse Z^n + r 1, chosen
    for each r. The nearest point is the hardest case. It holds squared and for every ratio: E
    |Q_fine(x) - x|^2 <= (fine/coarse)^2 E_r |x*_r - x|^2, whether or not the ratio is integer. For
    both lattices errors are uniform (above), so equality holds for the nearest points.
    """
    fine = mean((draws(shifted) - X).square())
    for ratio, arbitrary in product((2, 3, 16), (False, True)):
        coarse = lattice_errors(ratio * STEP, arbitrary)
        assert fine.less(coarse, 1 / ratio).at_most(0.0), (ratio, arbitrary)
    for ratio in (1.3, 2, 2.5, 16):
        assert fine.less(lattice_errors(ratio * STEP), 1 / ratio**2).within(0.0), ratio


def test_lemma_4_needs_the_shift() -> None:
    """Rounding to unshifted points breaks it: their error is up to three times Definition 1's."""
    fine = mean((draws(flipped) - X).square())
    coarse = (2 * STEP) ** 2 / 12  # of the nearest points of the shifted lattice
    assert fine[3:4].above(coarse / 2)  # half a step away
