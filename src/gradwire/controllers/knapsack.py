"""The problem of L-GreCo (THESIS 4.4): a bound of what any plan costs, and two ways to a plan.

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

import math
from dataclasses import dataclass

import numpy as np

_BISECTIONS = 60
_TOLERANCE = 1e-9  # relative: sums of floats, and tests that shorten lists
_ROUNDING = 1e-12  # of sums


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


# ---- over bins of error, rounded up


def by_bins(problem: Problem, bins: int) -> np.ndarray | None:
    """Choices, int64[layers], within the limit; None if rounding up leaves none (THESIS Alg. 4.1).

        step            limit / bins
        bins of a choice = ceil(error / step), so a plan of at most `bins` bins is within the limit
        best[l, e]      least cost of the first l layers at e bins or fewer
                        = min over c of best[l - 1, e - bins(l, c)] + cost(l, c)

    Time O(layers x choices x bins), with one addition and one minimum of numpy per layer and
    choice. Memory 8 x layers x bins bytes: choices are not stored, as the way back finds them.
    """
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
    return _back_over_bins(problem, best, costs, needed, bins)


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


def _back_over_bins(
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


# ---- exactly, by lists of undominated plans, where they stay short


def by_lists(problem: Problem, found: Bound, cost: float, most: int) -> list[np.ndarray]:
    """The cheapest plan within the limit that costs less than `cost`, as int64[layers]; exact but
    for the rounding of sums: a plan that is at the limit to the last bits comes before it.

    A list holds, of the first l layers, every (error, cost) that no other plan of these layers
    beats in both. Two tests shorten it: the rest of the layers must fit into the limit, and their
    bound must leave a chance to cost less than the best plan known. Lists of many layers may still
    grow without bound: the result is empty if there are more than `most` plans to look at, or none.
    """
    count = len(problem.costs)
    finite = np.isfinite(problem.costs)
    errors = np.where(finite, problem.errors, 0.0)
    priced = np.where(finite, problem.costs + found.price * errors, np.inf).min(axis=1)
    rest_priced = np.append(np.cumsum(priced[::-1])[::-1], 0.0)
    rest_error = np.append(np.cumsum(problem.errors.min(axis=1)[::-1])[::-1], 0.0)
    spent, paid, looked_at = np.zeros(1), np.zeros(1), 0
    origins: list[tuple[np.ndarray, np.ndarray]] = []  # per layer: entry before, choice
    for i in range(count):
        choices = np.flatnonzero(finite[i])
        looked_at += len(spent) * len(choices)
        if looked_at > most:
            return []
        e = (spent[:, None] + problem.errors[i, choices]).ravel()
        c = (paid[:, None] + problem.costs[i, choices]).ravel()
        fits = e + rest_error[i + 1] <= problem.limit * (1 + _TOLERANCE)
        least = c + found.price * (e - problem.limit) + rest_priced[i + 1]
        kept = np.flatnonzero(fits & (least <= cost * (1 + _TOLERANCE)))
        kept = kept[np.lexsort((c[kept], e[kept]))]
        costs = c[kept]
        before = np.minimum.accumulate(np.append(np.inf, costs))[:-1]
        kept = kept[costs < before]
        if not len(kept):
            return []
        spent, paid = e[kept], c[kept]
        origins.append((kept // len(choices), choices[kept % len(choices)]))
    ends: list[int] = []
    for limit in (problem.limit * (1 + _ROUNDING), problem.limit):
        within = np.flatnonzero((spent <= limit) & (paid < cost))
        if len(within):
            ends.append(int(within[paid[within].argmin()]))
    return [_back_over_lists(origins, end) for end in dict.fromkeys(ends)]


def _back_over_lists(origins: list[tuple[np.ndarray, np.ndarray]], end: int) -> np.ndarray:
    """The choices that led to an entry of the last list."""
    chosen = np.empty(len(origins), np.int64)
    at = end
    for i in reversed(range(len(origins))):
        entry, choice = origins[i]
        chosen[i], at = choice[at], int(entry[at])
    return chosen
