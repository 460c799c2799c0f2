"""Functions with known constants of smoothness and PL, and their best points on a lattice."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Problem(ABC):
    """f of vectors in the last dimension, minimal (0) at `centre`, beta-smooth and alpha-PL.

    alpha-PL: |grad f(x)|^2 / 2 >= alpha (f(x) - min f) for all x.
    """

    alpha: float
    beta: float
    centre: Tensor

    @abstractmethod
    def value(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def gradient(self, x: Tensor) -> Tensor: ...

    @property
    def condition(self) -> float:
        return self.beta / self.alpha

    def best(self, step: float, shifts: int = 2000) -> float:
        """E f(x*_r), x*_r the best point of step Z^n + r 1, over r ~ U[-step/2, step/2].

        The minimum is continuous and periodic in r, so a mean over even distances is exact to
        O(1/shifts^2). Where alpha/2 |x - centre|^2 <= f(x) <= beta/2 |x - centre|^2, no coordinate
        of x*_r is further from the centre than step/2 sqrt(n beta/alpha); all points up to there
        are tried. A coordinate that f does not depend on may take any value.
        """
        r = step * ((torch.arange(shifts, dtype=torch.float64) + 0.5) / shifts - 0.5).view(-1, 1)
        n = len(self.centre)
        reach = int(0.5 + 0.5 * (n * self.condition) ** 0.5)
        near = step * torch.round((self.centre - r) / step) + r
        least = torch.full((shifts,), torch.inf, dtype=torch.float64)
        for offset in itertools.product(range(-reach, reach + 1), repeat=n):
            least = torch.minimum(least, self.value(near + step * torch.tensor(offset)))
        return float(least.mean())


@dataclass(frozen=True, eq=False)
class Quadratic(Problem):
    """(x - centre)' H (x - centre) / 2; alpha is the least curvature above 0, beta the greatest."""

    hessian: Tensor
    centre: Tensor

    def value(self, x: Tensor) -> Tensor:
        d = x - self.centre
        return 0.5 * ((d @ self.hessian) * d).sum(-1)

    def gradient(self, x: Tensor) -> Tensor:
        return (x - self.centre) @ self.hessian

    @property
    def alpha(self) -> float:  # type: ignore[override]
        curvature = torch.linalg.eigvalsh(self.hessian)
        return float(curvature[curvature > 1e-9].min())

    @property
    def beta(self) -> float:  # type: ignore[override]
        return float(torch.linalg.eigvalsh(self.hessian).max())


@dataclass(frozen=True, eq=False)
class Ripples(Problem):
    """Sum of t^2/2 + 0.6 sin^2 t, t = x - centre: not convex (second derivative 1 + 1.2 cos 2t)."""

    centre: Tensor
    alpha: float = 0.46
    beta: float = 2.2

    def value(self, x: Tensor) -> Tensor:
        t = x - self.centre
        return (0.5 * t.square() + 0.6 * t.sin().square()).sum(-1)

    def gradient(self, x: Tensor) -> Tensor:
        t = x - self.centre
        return t + 0.6 * (2 * t).sin()


def rotated(curvatures: list[float], seed: int) -> Tensor:
    """A symmetric matrix with these eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    n = len(curvatures)
    basis = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator)).Q
    return basis @ torch.diag(torch.tensor(curvatures, dtype=torch.float64)) @ basis.T


CENTRE = torch.tensor([0.3137, -1.1071, 0.7302], dtype=torch.float64)
PROBLEMS: dict[str, Problem] = {
    "quadratic": Quadratic(rotated([1.0, 2.0, 4.0], seed=1), CENTRE),
    # PL, not strongly convex: f does not depend on the last coordinate
    "flat": Quadratic(
        torch.block_diag(rotated([1.0, 3.0], seed=2), torch.zeros(1, 1, dtype=torch.float64)),
        CENTRE,
    ),
    # PL, not convex
    "ripples": Ripples(CENTRE),
}


def sum_of(n: int) -> Quadratic:
    """(x_1 + ... + x_n)^2 / 2n: alpha = beta = 1, and the minima form a plane across all axes."""
    return Quadratic(torch.full((n, n), 1 / n, dtype=torch.float64), torch.zeros(n).double())
