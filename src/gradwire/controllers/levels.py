"""What CGX's heuristics share: levels of compression, mapped to each layer's own choices (CGX 5).

A layer's ladder is its choices from the cheapest to the most accurate, without those that another
beats in both. A heuristic gives every layer a height from 0 to 1. A window (low, high) of the
ladder, also from 0 to 1, maps heights to choices: the choice at low + height (high - low) of the
ladder's length. CGX leaves the window to the user, with its error below alpha E_4; here all windows
of a grid are tried, and the cheapest plan within the budget is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradwire.controllers import error
from gradwire.controllers.layer import Budget, Layer, plan_cost, plan_error

_GRID = 40  # windows begin and end at multiples of this part of a ladder


class Ladders:
    """The ladders of all layers, and the cheapest plan of those offered."""

    def __init__(self, layers: Sequence[Layer], budget: Budget) -> None:
        self._layers = layers
        self._budget = budget
        self._ladders = [_ladder(one) for one in layers]
        longest = max(map(len, self._ladders))
        self._grid = np.linspace(0, 1, min(_GRID, longest - 1) + 1 if longest > 1 else 1)
        self._costs, self._errors = self._tables(longest)
        self._lengths = np.array([len(ladder) for ladder in self._ladders])
        self.best: list[int] | None = None
        self._cost = np.inf

    def offer(self, heights: np.ndarray) -> None:
        """Try all windows with these heights, float64[layers]."""
        rows = np.arange(len(heights))
        for low in self._grid:
            for high in self._grid[self._grid >= low]:
                at = np.rint((low + heights * (high - low)) * (self._lengths - 1)).astype(np.int64)
                cost = float(self._costs[rows, at].sum())
                spent = float(self._errors[rows, at].sum())
                if cost < self._cost and spent <= self._budget.error * (1 + 1e-12):
                    self._keep([int(self._ladders[i][a]) for i, a in enumerate(at)])

    def _keep(self, plan: list[int]) -> None:
        """Keep a plan if its exact sums say that it is cheaper and within the budget."""
        cost = plan_cost(self._layers, plan)
        within = plan_error(self._layers, plan, self._budget.metric) <= self._budget.error
        if within and cost < self._cost:
            self.best, self._cost = plan, cost

    def _tables(self, longest: int) -> tuple[np.ndarray, np.ndarray]:
        costs, errors = np.zeros((2, len(self._layers), longest))
        for i, (one, ladder) in enumerate(zip(self._layers, self._ladders, strict=True)):
            costs[i, : len(ladder)] = one.weight * one.nbytes[ladder]
            errors[i, : len(ladder)] = error.terms(one.errors, self._budget.metric)[ladder]
        return costs, errors


def _ladder(one: Layer) -> np.ndarray:
    """Indices of the choices that none beats in bytes and error, ascending in bytes."""
    order = np.lexsort((one.errors, one.nbytes))
    errors = one.errors[order]
    before = np.minimum.accumulate(np.append(np.inf, errors))[:-1]
    kept: np.ndarray = order[errors < before]
    return kept
