"""Sums over consecutive steps from which `bench error` computes NMSE and cosine, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class Sums:
    """The sums of one parameter, of the average a, the exact mean m, and f, the mean of what ranks
    fed in.

    Attributes:
        numel: its values.
        steps: of each step so far |a - m|^2, |m|^2, |a|^2, a . m, |a - f|^2 and |f|^2.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.numel = math.prod(shape)
        self.steps: list[list[float]] = []
        self._lost = torch.zeros(shape, dtype=torch.float64)
        self._exact = torch.zeros(shape, dtype=torch.float64)

    def add(
        self, gradients: Sequence[torch.Tensor], residual: torch.Tensor, average: torch.Tensor
    ) -> None:
        """Add a step: all ranks' gradients, the mean of their residuals before, and the average."""
        mean = torch.zeros_like(self._exact)
        for gradient in gradients:
            mean += gradient
        mean /= len(gradients)
        a = average.double()
        lost, fed = a - mean, mean + residual
        late = a - fed
        pairs = ((lost, lost), (mean, mean), (a, a), (a, mean), (late, late), (fed, fed))
        self.steps.append([float((x * y).sum()) for x, y in pairs])
        self._lost += lost
        self._exact += mean

    def of_sum(self) -> tuple[float, float]:
        """|sum of a - sum of m|^2 and |sum of m|^2, over all steps."""
        return float(self._lost.square().sum()), float(self._exact.square().sum())


def figures(parts: Sequence[Sums]) -> dict[str, Any]:
    """numel, nmse, nmse_by_step, nmse_of_fed, nmse_of_sum and cosine of these parameters as one
    vector; null where the exact mean is zero."""
    steps = np.sum([part.steps for part in parts], axis=0)
    error, exact, _, _, fed_error, fed = steps.sum(0).tolist()
    cosines = [p / math.sqrt(a * m) for _, m, a, p, _, _ in steps.tolist() if a and m]
    return {
        "numel": sum(part.numel for part in parts),
        "nmse": _ratio(error, exact),
        "nmse_by_step": [_ratio(*step[:2]) for step in steps.tolist()],
        "nmse_of_fed": _ratio(fed_error, fed),
        "nmse_of_sum": _ratio(*map(sum, zip(*(part.of_sum() for part in parts), strict=True))),
        "cosine": sum(cosines) / len(steps),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
