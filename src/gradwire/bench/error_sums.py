"""Sums over consecutive steps from which `bench error` computes NMSE and cosine, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class StepSums(NamedTuple):
    """Sums of one step, of the average a, the exact mean m, and f, the mean of what ranks fed in.

    Attributes:
        error, exact, average, product: |a - m|^2, |m|^2, |a|^2 and a . m.
        fed_error, fed: |a - f|^2 and |f|^2.
    """

    error: float
    exact: float
    average: float
    product: float
    fed_error: float
    fed: float


class Sums:
    """The sums of one parameter.

    Attributes:
        numel: its values.
        steps: of each step so far.
        error_of_sum, exact_of_sum: |sum of a - sum of m|^2 and |sum of m|^2, over all steps.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.numel = math.prod(shape)
        self.steps: list[StepSums] = []
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
        a, fed = average.double(), mean + residual
        self.steps.append(
            StepSums(
                _square(a - mean), _square(mean), _square(a), float((a * mean).sum()),
                _square(a - fed), _square(fed),
            )
        )  # fmt: skip
        self._lost += a - mean
        self._exact += mean

    @property
    def error_of_sum(self) -> float:
        return _square(self._lost)

    @property
    def exact_of_sum(self) -> float:
        return _square(self._exact)


def figures(parts: Sequence[Sums]) -> dict[str, Any]:
    """numel, nmse, nmse_by_step, nmse_of_fed, nmse_of_sum and cosine of these parameters as one
    vector; null where the exact mean is zero."""
    steps = [
        StepSums(*map(sum, zip(*of_parts, strict=True)))
        for of_parts in zip(*(part.steps for part in parts), strict=True)
    ]
    total = StepSums(*map(sum, zip(*steps, strict=True)))
    cosines = [s.product / math.sqrt(s.average * s.exact) for s in steps if s.average and s.exact]
    return {
        "numel": sum(part.numel for part in parts),
        "nmse": _ratio(total.error, total.exact),
        "nmse_by_step": [_ratio(step.error, step.exact) for step in steps],
        "nmse_of_fed": _ratio(total.fed_error, total.fed),
        "nmse_of_sum": _ratio(
            sum(part.error_of_sum for part in parts), sum(part.exact_of_sum for part in parts)
        ),
        "cosine": _ratio(sum(cosines), len(steps)),
    }


def _square(values: torch.Tensor) -> float:
    return float(values.square().sum())


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
