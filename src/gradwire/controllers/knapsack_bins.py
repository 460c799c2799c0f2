"""Dynamic programming over bins of error (THESIS Alg. 4.1).

    step            limit / bins
    bins of a choice = ceil(error / step), so a plan of at most `bins` bins is within the limit
    best[l, e]      least cost of the first l layers at e bins or fewer
                    = min over c of best[l - 1, e - bins(l, c)] + cost(l, c)

Time O(layers x choices x bins), with one addition and one minimum of numpy per layer and choice.
Memory 8 x layers x bins bytes: choices are not stored, as the way back finds them again.
"""

from __future__ import annotations

import math

import numpy as np

from gradwire.controllers.knapsack_bounds import Problem


def by_bins(problem: Problem, bins: int) -> np.ndarray | None:
    """Choices, int64[layers], within the limit; None if rounding up leaves none."""
    costs, needed = _rounded(problem, bins)
    count = len(costs)
    best = np.full((count + 1, bins + 1), np.inf)
    best[0] = 0.0
    scratch = np.empty(bins + 1)
    first = 0  # below this number of bins the layers so far have no plan
    for i in range(count):
        before, row = best[i], best[i + 1]
        for cost, need in zip(costs[i], needed[i], strict=True):
            start = first + need
            if start > bins:
                continue
            part = scratch[: bins + 1 - start]
            np.add(before[first : bins + 1 - need], cost, out=part)
            np.minimum(row[start:], part, out=row[start:])
        first += min(needed[i], default=bins + 1)
        if first > bins:
            return None
    return _way_back(problem, best, costs, needed, bins)


def _rounded(problem: Problem, bins: int) -> tuple[list[list[float]], list[list[int]]]:
    """Per layer the costs and the bins of its choices that fit."""
    step = problem.limit / bins
    costs: list[list[float]] = []
    needed: list[list[int]] = []
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(problem.errors == 0, 0.0, problem.errors / step)
    whole = np.ceil(np.where(np.isfinite(scaled), scaled, bins + 1.0) * (1 + 1e-12))
    fits = np.isfinite(problem.costs) & (whole <= bins)
    for kept, cost, bin_ in zip(fits, problem.costs, whole, strict=True):
        cheapest: dict[int, float] = {}
        for c, b in zip(cost[kept].tolist(), bin_[kept].tolist(), strict=True):
            cheapest[int(b)] = min(c, cheapest.get(int(b), math.inf))
        costs.append(list(cheapest.values()))
        needed.append(list(cheapest))
    return costs, needed


def _way_back(
    problem: Problem,
    best: np.ndarray,
    costs: list[list[float]],
    needed: list[list[int]],
    bins: int,
) -> np.ndarray:
    """The choices of the cheapest plan, from the last layer to the first."""
    at = bins
    chosen = np.empty(len(costs), np.int64)
    for i in reversed(range(len(costs))):
        value = best[i + 1, at]
        pairs = zip(costs[i], needed[i], strict=True)
        cost, need = next((c, b) for c, b in pairs if b <= at and best[i, at - b] + c == value)
        # of the choices with these bins the one of this cost that errs least
        same = problem.costs[i] == cost
        chosen[i] = np.where(same, problem.errors[i], np.inf).argmin()
        at -= need
    return chosen
