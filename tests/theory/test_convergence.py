"""Theorem 2 and Corollary 3 of THESIS 5.5.2, with their own constants."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from descent import POWERS, fine_step, iterations, step_down
from lattice import flipped, mean, shifted
from problems import CENTRE, PROBLEMS, Problem, sum_of
from torch import Generator, Tensor

from products import exhaustive

CHAINS = 500
COARSE = 1.0
START = CENTRE + torch.tensor([6.0, -4.0, 8.0], dtype=torch.float64)


def run(
    problem: Problem,
    start: Tensor,
    fine: float,
    eta: float,
    sigma: float,
    steps: int,
    compress: Callable[[Tensor, Generator], Tensor] = lambda g, _: g,
) -> Tensor:
    """x_T of CHAINS independent runs. No more precise copy of x is kept from step to step."""
    generator = Generator().manual_seed(6)
    x = start.expand(CHAINS, -1)
    for _ in range(steps):
        x = step_down(problem, x, fine, eta, sigma, generator, lambda g: compress(g, generator))
    return x


# (noise, m, share): a small share tests the lattice, one above B the noise
SETTINGS = [(0.0, 1, 0.1), (1.0, 1, 0.1), (1.0, 4, 0.1), (1.0, 1, 4), (1.0, 4, 4)]
QUANTISED = (1.0, 16, 4)
QUANTISERS: dict[str, tuple[Callable[[Tensor, float, Generator], Tensor], float]] = {
    "coins": (flipped, 1 / 4),
    "shift": (shifted, 1 / 12),
}


def holds(
    name: str, noise: float, m: int, share: float, lattice: str, quantiser: str | None = None
) -> bool:
    """Theorem 2: E f(x_T) <= B + epsilon, B = E f(x*_r), x*_r the best point of coarse Z^n + r 1.

    Conditions: f is beta-smooth and alpha-PL; E g(x) = grad f(x), E |g(x) - grad f(x)|^2 <=
    sigma^2; eta = min(3 epsilon alpha / 10 sigma^2, 1); x_{t+1} = Q_fine(x_t - eta/beta g(x_t)),
    fine = eta coarse / ceil(16 (beta/alpha)^2); T = 10/eta beta/alpha ln((f(x_0) - B) / epsilon).
    Lemma 4 as stated wants coarse/fine to be an integer, so sigma is chosen for eta = 1/m. The
    coarser lattice has the root of fine/coarse.

    With a quantiser, Corollary 3: the same with gradients quantised as well, x_{t+1} = Q_fine(x_t -
    eta/beta Qg(g(x_t))), where E Qg(g) = g and E |Qg(g) - g|^2 <= sigma_g^2 for every g met; eta =
    min(3 epsilon alpha / 10 (sigma^2 + sigma_g^2), 1). A step d gives coins at most n d^2 / 4, and
    Definition 1 n d^2 / 12. Here both have half of the variance.
    """
    problem = PROBLEMS[name]
    best = problem.best(COARSE)
    epsilon, eta = share * best, 1 / m
    sigma = noise * (0.3 * epsilon * problem.alpha * m) ** 0.5
    fine = fine_step(problem, eta, COARSE, POWERS[lattice])
    steps = iterations(problem, eta, float(problem.value(START)) - best, epsilon)
    if quantiser is None:
        x = run(problem, START, fine, eta, sigma, steps)
        apart = (x - x[:, :1]) / fine
        assert torch.allclose(apart, apart.round(), atol=1e-6)  # on fine Z^n + r 1
    else:
        rounded, variance = QUANTISERS[quantiser]
        sigma /= 2**0.5
        step = sigma / (variance * len(CENTRE)) ** 0.5
        x = run(problem, START, fine, eta, sigma, steps, lambda g, drawn: rounded(g, step, drawn))
    return mean(problem.value(x)).at_most(best + epsilon)


CASES = [*product(SETTINGS, POWERS), *product([QUANTISED], POWERS, QUANTISERS)]
SAMPLE = {
    "quadratic": [(SETTINGS[0], "as stated"), (SETTINGS[3], "coarser")],
    "flat": [(QUANTISED, "as stated", "shift")],
}


@pytest.mark.parametrize(
    ("name", "cases"), [*SAMPLE.items(), *exhaustive(*((name, CASES) for name in PROBLEMS))]
)
def test_theorem_2_and_corollary_3(name: str, cases: list[Any]) -> None:
    assert [case for case in cases if not holds(name, *case[0], *case[1:])] == []


def test_theorem_2_fails_where_minima_form_a_plane_across_the_axes() -> None:
    """As Lemma 9 does (test_descent.py): f = (x_1 + ... + x_n)^2 / 2n, alpha = beta = 1, no noise.

    From x_0 = 2 1 each step leads to 0 and then to r 1: E f(x_T) = n fine^2 / 24, with fine =
    coarse/16, against B = coarse^2 / 24n. Above n = 16 the difference does not depend on T.
    """
    n = 32
    problem = sum_of(n)
    start = torch.full((n,), 2.0, dtype=torch.float64)
    best = COARSE**2 / (24 * n)
    epsilon = best
    fine = fine_step(problem, 1.0, COARSE, 1.0)
    steps = iterations(problem, 1.0, float(problem.value(start)) - best, epsilon)
    found = mean(problem.value(run(problem, start, fine, 1.0, 0.0, steps)))
    assert found.within(n * fine**2 / 24)
    assert found.above(best + epsilon)
