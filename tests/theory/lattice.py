"""The operators of THESIS 5.5 and C.5.3 as they are defined, in float64; and means of many draws.

A vector is the last dimension of a tensor; each vector gets random numbers of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

SIGMAS = 5  # the tests' tolerance: so many standard errors of a mean


def shifts(x: Tensor, step: float, generator: Generator) -> Tensor:
    """r ~ U[-step/2, step/2], one per vector of x: x's shape, with 1 for the last dimension."""
    uniform = torch.rand(*x.shape[:-1], 1, dtype=torch.float64, generator=generator)
    return step * (uniform - 0.5)


def nearest(x: Tensor, step: float, r: Tensor) -> Tensor:
    """Definition 1 for a given r: the nearest points of step Z + r."""
    return step * torch.round((x - r) / step) + r


def shifted(x: Tensor, step: float, generator: Generator) -> Tensor:
    """Definition 1: round to the nearest point of step Z + r, with one r for the whole vector."""
    return nearest(x, step, shifts(x, step, generator))


def unshifted(x: Tensor, step: float, generator: Generator) -> Tensor:
    """Definition 1 without adding r again: the result lies on step Z."""
    r = shifts(x, step, generator)
    return nearest(x, step, r) - r


def flipped(x: Tensor, step: float, generator: Generator) -> Tensor:
    """Definition 12, stochastic rounding to step Z: each coordinate has a coin of its own."""
    coin = torch.rand(x.shape, dtype=torch.float64, generator=generator)
    return step * torch.floor(x / step + coin)


@dataclass(frozen=True)
class Mean:
    """Of independent samples along the first dimension."""

    value: Tensor
    error: Tensor  # the standard error of the value

    def __getitem__(self, places: slice) -> Mean:
        return Mean(self.value[places], self.error[places])

    def less(self, other: Mean, factor: float) -> Mean:
        """This, less `factor` times another one of independent samples."""
        error = (self.error.square() + (factor * other.error).square()).sqrt()
        return Mean(self.value - factor * other.value, error)

    def within(self, expected: Tensor | float) -> bool:
        return bool(((self.value - expected).abs() <= SIGMAS * self.error + 1e-12).all())

    def at_most(self, bound: Tensor | float) -> bool:
        """Whether the samples are consistent with a mean that is nowhere above the bound."""
        return bool((self.value <= bound + SIGMAS * self.error + 1e-12).all())

    def above(self, bound: Tensor | float) -> bool:
        """Whether chance does not explain a value above the bound."""
        return bool((self.value > bound + SIGMAS * self.error).all())


def mean(samples: Tensor) -> Mean:
    return Mean(samples.mean(0), samples.std(0) / len(samples) ** 0.5)
