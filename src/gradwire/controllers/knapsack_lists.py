"""The exact optimum by lists of undominated plans, where they stay short.

A list holds, of the first l layers, every (error, cost) that no other plan of these layers beats in
both. Two tests shorten it: the rest of the layers must fit into the limit, and their bound
(`knapsack_bounds`) must leave a chance to cost less than the best plan known. Lists of many layers
may still grow without bound, so too many plans end the search.
"""

from __future__ import annotations

import numpy as np

from gradwire.controllers.knapsack_bounds import Bound, Problem

_TOLERANCE = 1e-9  # of tests that shorten lists
_ROUNDING = 1e-12  # of sums


def by_lists(problem: Problem, found: Bound, cost: float, most: int) -> list[np.ndarray]:
    """The cheapest plan within the limit that costs less than `cost`, as int64[layers]; exact but
    for the rounding of sums: a plan that is at the limit to the last bits comes before it.

    The list is empty if there is none, or there are more than `most` plans to look at.
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
    return [_way_back(origins, end) for end in dict.fromkeys(ends)]


def _way_back(origins: list[tuple[np.ndarray, np.ndarray]], end: int) -> np.ndarray:
    """The choices that led to an entry of the last list."""
    chosen = np.empty(len(origins), np.int64)
    at = end
    for i in reversed(range(len(origins))):
        entry, choice = origins[i]
        chosen[i], at = choice[at], int(entry[at])
    return chosen
