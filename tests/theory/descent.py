"""The step and the iteration of THESIS 5.5, with the constants of its lemmas and theorems."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from lattice import shifted
from problems import Problem
from torch import Generator, Tensor

# Lemma 4 lets the squared error of a lattice shrink with the ratio of its step to the benchmark's.
# For Definition 1 it shrinks with the ratio's square, so the same proofs allow a coarser lattice.
POWERS = {"as stated": 1.0, "coarser": 0.5}


def noisy(problem: Problem, x: Tensor, sigma: float, generator: Generator) -> Tensor:
    """A stochastic gradient: unbiased, with variance sigma^2 (E |g - grad f|^2)."""
    n = x.shape[-1]
    noise = torch.randn(x.shape, dtype=torch.float64, generator=generator)
    return problem.gradient(x) + sigma / n**0.5 * noise


def step_down(
    problem: Problem,
    x: Tensor,
    fine: float,
    eta: float,
    sigma: float,
    generator: Generator,
    compress: Callable[[Tensor], Tensor] = lambda g: g,
) -> Tensor:
    """Q_fine(x - eta/beta Qg(g(x)))."""
    gradient = compress(noisy(problem, x, sigma, generator))
    return shifted(x - eta / problem.beta * gradient, fine, generator)


def fine_step(problem: Problem, eta: float, coarse: float, power: float) -> float:
    """Theorem 2's lattice for a benchmark with step `coarse`: eta / ceil(16 (beta/alpha)^2)."""
    return coarse * (eta / math.ceil(16 * problem.condition**2)) ** power


def iterations(problem: Problem, eta: float, gap: float, epsilon: float) -> int:
    """Theorem 2's T, rounded up; gap: f(x_0) - E f(x*_r)."""
    return math.ceil(10 / eta * problem.condition * math.log(gap / epsilon))
