"""Lemmas 9 and 10 of THESIS C.5.2: what one step on the lattice gains."""

from __future__ import annotations

import math
from itertools import product

import torch
from descent import POWERS, fine_step, step_down
from lattice import mean
from problems import CENTRE, PROBLEMS, Problem, sum_of
from torch import Generator, Tensor

DRAWS = 20_000
COARSE = 1.0
# from a minimum, near it, at distances of a step of the lattice, and far
STARTS = {
    name: CENTRE + size * torch.tensor([1.0, -0.6, 0.4], dtype=torch.float64)
    for name, size in {"minimum": 0.0, "near": 0.1, "beside": 1.0, "far": 30.0}.items()
}


def after(
    problem: Problem, start: Tensor, fine: float, eta: float = 1.0, sigma: float = 0.0
) -> Tensor:
    """f after one step, DRAWS times."""
    x = start.expand(DRAWS, -1)
    return problem.value(step_down(problem, x, fine, eta, sigma, Generator().manual_seed(4)))


def test_problems_are_smooth_and_pl() -> None:
    """The conditions of all that follows, at points up to 30 from the minimum."""
    for problem in (*PROBLEMS.values(), sum_of(3)):
        generator = Generator().manual_seed(5)
        size = 30 * torch.rand(200_000, 1, dtype=torch.float64, generator=generator)
        x = problem.centre + size * torch.randn(len(size), 3, generator=generator).double()
        f, g = problem.value(x), problem.gradient(x)
        assert bool((g.square().sum(-1) / 2 >= problem.alpha * f * (1 - 1e-9)).all())
        d = x.roll(1, 0) * torch.rand(len(size), 1, generator=generator) - x
        above = f + (g * d).sum(-1) + problem.beta / 2 * d.square().sum(-1)
        assert bool((problem.value(x + d) <= above * (1 + 1e-9) + 1e-9).all())


def test_lemma_9() -> None:
    """E f(x') - B <= (1 - alpha / 2 beta) (f(x) - B), B = E f(x*_r), x*_r the best of coarse Z + r.

    Conditions: f is beta-smooth and alpha-PL; x' = Q_fine(x - grad f(x) / beta); fine = coarse /
    ceil(4 (beta/alpha)^2). The coarser lattice has the root of this fraction.
    """
    wrong = []
    for name, problem in PROBLEMS.items():
        best = problem.best(COARSE)
        keep = 1 - 1 / (2 * problem.condition)
        for (start, x), (lattice, power) in product(STARTS.items(), POWERS.items()):
            fine = COARSE / math.ceil(4 * problem.condition**2) ** power
            bound = best + keep * (float(problem.value(x)) - best)
            if not mean(after(problem, x, fine)).at_most(bound):
                wrong.append((name, start, lattice))
    assert wrong == []


def test_lemma_10() -> None:
    """E[f(x') | x] - B <= (1 - 3/4 eta alpha/beta) (f(x) - B) + 5/4 eta^2/beta sigma^2.

    Conditions: as in Lemma 9, but x' = Q_fine(x - eta/beta g(x)) with E g(x) = grad f(x), E |g(x) -
    grad f(x)|^2 <= sigma^2, 0 < eta <= 1, and fine = eta coarse / ceil(16 (beta/alpha)^2). With eta
    = 1/m coarse/fine is an integer.
    """
    wrong, sigma = [], 2.0
    for name, problem in PROBLEMS.items():
        best = problem.best(COARSE)
        for eta, (start, x), (lattice, power) in product(
            (1.0, 1 / 2, 1 / 10), STARTS.items(), POWERS.items()
        ):
            fine = fine_step(problem, eta, COARSE, power)
            keep = 1 - 0.75 * eta / problem.condition
            noise = 1.25 * eta**2 * sigma**2 / problem.beta
            bound = best + keep * (float(problem.value(x)) - best) + noise
            if not mean(after(problem, x, fine, eta, sigma)).at_most(bound):
                wrong.append((name, eta, start, lattice))
    assert wrong == []


def test_lemma_9_fails_where_minima_form_a_plane_across_the_axes() -> None:
    """f = (x_1 + ... + x_n)^2 / 2n is PL with alpha = beta = 1, and x = 0 is a minimum.

    x' = r 1, r ~ U[-fine/2, fine/2]: E f(x') = n fine^2 / 24. The sums of the points of coarse Z^n
    + r 1 are coarse Z + n r, so B = coarse^2 / 24n; E f(x') is n^2 / 16 times that. The proof uses
    one minimum x* for both distances |x - x*| and |x*_r - x*|; Lemma 8 bounds the distance to the
    nearest minimum, another one for each point.
    """
    n, fine = 16, COARSE / 4
    problem = sum_of(n)
    found = mean(after(problem, torch.zeros(n).double(), fine))
    assert found.within(n * fine**2 / 24)
    best = COARSE**2 / (24 * n)
    assert found.above(best + 0.5 * (0 - best))
