"""The problem of L-GreCo (THESIS 4.4), a bound of what any plan costs, and what follows from it.

    minimise    sum over layers of cost(l, c_l)
    subject to  sum over layers of error(l, c_l) <= limit

This is the multiple-choice knapsack problem. For every price p >= 0 of a unit of error,

    bound(p) = sum over layers of min over c of (cost + p error)  -  p limit

is at most the cost of any plan within the limit. The best price is found by bisection; the layers'
minima at that price are a plan, and nearly the best one where there are many layers. A choice that
would bring the bound above a known plan's cost is in no better plan and is left out. Both are exact
statements, so what is left out is never missed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_BISECTIONS = 60
_TOLERANCE = 1e-9  # relative: sums of floats


@dataclass(frozen=True, eq=False)
class Problem:
    """Tables as arrays; a layer with fewer choices than others is padded with infinities.

    Attributes:
        costs, errors: float64[layers, choices], 0 or more.
        limit: of the sum of errors.
    """

    costs: np.ndarray
    errors: np.ndarray
    limit: float

    def cost(self, chosen: np.ndarray) -> float:
        return float(self.costs[np.arange(len(chosen)), chosen].sum())

    def error(self, chosen: np.ndarray) -> float:
        return float(self.errors[np.arange(len(chosen)), chosen].sum())


@dataclass(frozen=True, eq=False)
class Bound:
    """What a price of error says.

    Attributes:
        price: of a unit of error.
        cost: no plan within the limit costs less.
        plan: int64[layers], choices within the limit; None if the least errors exceed it.
    """

    price: float
    cost: float
    plan: np.ndarray | None


def padded(costs: list[np.ndarray], errors: list[np.ndarray], limit: float) -> Problem:
    """A problem from a table per layer."""
    width = max(map(len, costs))
    shape = len(costs), width
    padded_costs, padded_errors = np.full(shape, np.inf), np.full(shape, np.inf)
    for i, (c, e) in enumerate(zip(costs, errors, strict=True)):
        padded_costs[i, : len(c)] = np.where(np.isfinite(e), c, np.inf)
        padded_errors[i, : len(e)] = e
    return Problem(padded_costs, padded_errors, limit)


def undominated(problem: Problem) -> Problem:
    """Without choices that cost and err no less than another of their layer, and without those that
    exceed the limit even where all other layers err least.

    They become infinite, so that indices stay.
    """
    rows = np.arange(len(problem.costs))[:, None]
    order = np.lexsort((problem.errors, problem.costs))
    errors = problem.errors[rows, order]
    before = np.full_like(errors, np.inf)
    before[:, 1:] = np.minimum.accumulate(errors, axis=1)[:, :-1]
    kept = np.zeros(errors.shape, bool)
    kept[rows, order] = errors < before
    least = problem.errors.min(axis=1)
    others = least.sum() - least
    kept &= problem.errors + others[:, None] <= problem.limit * (1 + _TOLERANCE)
    kept[np.arange(len(least)), problem.errors.argmin(axis=1)] = True
    return without(problem, kept)


def without(problem: Problem, kept: np.ndarray) -> Problem:
    """With these choices alone, bool[layers, choices]."""
    costs, errors = problem.costs, problem.errors
    return Problem(np.where(kept, costs, np.inf), np.where(kept, errors, np.inf), problem.limit)


def bound(problem: Problem) -> Bound:
    """The greatest bound over all prices, and the plan at the price from which plans are within the
    limit."""
    costs, limit = problem.costs, problem.limit
    errors = np.where(np.isinf(costs), 0.0, problem.errors)
    rows = np.arange(len(costs))

    def at(price: float) -> tuple[float, np.ndarray, float]:
        priced = costs + price * errors
        chosen = priced.argmin(axis=1)
        spent = float(errors[rows, chosen].sum())
        return float(priced[rows, chosen].sum()) - price * limit, chosen, spent

    least = problem.errors.argmin(axis=1)
    feasible = problem.error(least) <= limit
    value, chosen, spent = at(0.0)
    best = Bound(0.0, value, chosen if spent <= limit else None)
    if best.plan is not None or not feasible:
        return best
    low, high = 0.0, _first_price(problem)
    plan = least
    for _ in range(_BISECTIONS):
        value, chosen, spent = at(high)
        if value > best.cost:
            best = Bound(high, value, None)
        if spent <= limit:
            plan = chosen
            break
        low, high = high, 4 * high
    for _ in range(_BISECTIONS):
        if high - low <= 1e-12 * high:
            break
        middle = (low + high) / 2
        value, chosen, spent = at(middle)
        if value > best.cost:
            best = Bound(middle, value, None)
        if spent <= limit:
            high, plan = middle, chosen
        else:
            low = middle
    return Bound(best.price, best.cost, plan)


def worthwhile(problem: Problem, found: Bound, cost: float) -> np.ndarray:
    """Which choices may be in a plan that costs less than `cost`: bool[layers, choices]."""
    errors = np.where(np.isinf(problem.costs), 0.0, problem.errors)
    priced = problem.costs + found.price * errors
    more: np.ndarray = priced - priced.min(axis=1, keepdims=True)
    return found.cost + more <= cost * (1 + _TOLERANCE)


def _first_price(problem: Problem) -> float:
    """A price of the right order: the costs' spread over the limit."""
    finite = problem.costs[np.isfinite(problem.costs)]
    return float(max(finite.max(), 1.0)) / max(problem.limit, np.finfo(float).tiny * 1e20)
