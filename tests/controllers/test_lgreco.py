"""LGreco: within its budget, never worse than uniform, near the optimum, deterministic, fast; and
weights of bytes from measured spans."""

from __future__ import annotations

import math
import time
from itertools import product

import numpy as np
import pytest

from controllers.random_tables import KINDS, best_cost, random_layers
from gradwire.aggregators import Dense
from gradwire.controllers import Budget, LGreco, time_weights
from gradwire.controllers.error import METRICS
from gradwire.controllers.knapsack import (
    Problem,
    bound,
    by_bins,
    by_lists,
    padded,
    undominated,
    worthwhile,
)
from gradwire.controllers.layer import Layer, plan_cost, plan_error
from gradwire.controllers.lgreco import fill

ALPHAS = (0.5, 1.0, 1.5)


def problem(layers: list[Layer], budget: Budget) -> Problem:
    costs = [one.weight * one.nbytes for one in layers]
    return padded(costs, [one.errors for one in layers], budget.error)


@pytest.mark.parametrize("kind", KINDS)
def test_near_the_optimum_on_small_cases(kind: str) -> None:
    """Within 1 % of the best plan, found by trying all; most often it is the best."""
    exact = cases = 0
    for seed, (metric, alpha) in enumerate(list(product(METRICS, ALPHAS)) * 6):
        layers = random_layers(seed, 1 + seed % 5, 2 + seed % 4, kind)
        budget = Budget.of(layers, alpha, metric)
        best = best_cost(layers, budget)
        found = LGreco().propose(layers, budget)
        assert bool(found.fallback) == math.isinf(best) or found.choices
        if math.isinf(best):
            assert "no plan is within" in found.fallback
            continue
        assert found.error <= budget.error
        cost = plan_cost(layers, found.choices)
        assert cost <= 1.01 * best
        exact, cases = exact + (cost <= best * (1 + 1e-12)), cases + 1
    assert exact >= 0.95 * cases


@pytest.mark.parametrize("kind", KINDS)
def test_bins_alone_keep_to_the_limit_and_miss_no_more_than_rounding(kind: str) -> None:
    """The table over bins is optimal for the limit less one bin per layer."""
    for seed in range(15):
        layers = random_layers(200 + seed, 4, 4, kind)
        budget = Budget.of(layers)
        if budget.error == 0:
            continue
        for bins in (20, 300):
            found = by_bins(problem(layers, budget), bins)
            less = Budget(budget.error * (1 - (len(layers) + 1e-9) / bins))
            if found is None:
                assert math.isinf(best_cost(layers, less))
                continue
            assert plan_error(layers, found.tolist(), "l2") <= budget.error * (1 + 1e-12)
            assert plan_cost(layers, found.tolist()) <= best_cost(layers, less) * (1 + 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_below_every_plan_and_leaves_the_best_one(kind: str) -> None:
    for seed in range(20):
        layers = random_layers(300 + seed, 4, 4, kind)
        budget = Budget.of(layers)
        best = best_cost(layers, budget)
        whole = undominated(problem(layers, budget))
        found = bound(whole)
        assert found.cost <= best * (1 + 1e-9)
        if found.plan is not None:
            assert whole.error(found.plan) <= budget.error * (1 + 1e-12)
        kept = worthwhile(whole, found, best)
        assert kept.any(axis=1).all()
        exact = by_lists(whole, found, best * (1 + 1e-6), 10**6)[0]
        assert plan_cost(layers, exact.tolist()) == pytest.approx(best)
        assert kept[np.arange(len(layers)), exact].all()


def test_the_fill_spends_what_is_left() -> None:
    one = Problem(
        np.array([[9.0, 5.0, 1.0], [9.0, 4.0, 3.0]]), np.array([[0, 1, 9], [0, 1, 2.0]]), 3
    )
    assert fill(one, np.array([0, 0])).tolist() == [1, 2]
    assert fill(one, np.array([1, 2])).tolist() == [1, 2]


def test_the_exact_search_finds_what_few_bins_miss() -> None:
    for seed in range(15):
        layers = random_layers(500 + seed, 5, 5, "scattered")
        budget = Budget.of(layers)
        found = LGreco(bins=2, gap=0).propose(layers, budget)
        assert found.nbytes == best_cost(layers, budget)


def pairs(count: int, error: float) -> list[Layer]:
    """Layers of two choices: 10 bytes with this error, or 100 and more without."""
    methods = (Dense(), Dense())
    return [
        Layer(f"{i}", 1, methods, np.array([10, 100 + i]), np.array([error, 0.0]), 1, 1, 1)
        for i in range(count)
    ]


def test_a_sum_that_rounds_down_to_the_budget_is_above_it() -> None:
    """0.1 added ten times is below 1 in floats; the true sum is above."""
    for limit, nbytes in ((1.0, 100), (float(np.nextafter(1.0, 0)), 190)):
        found = LGreco().propose(pairs(10, 0.1), Budget(limit))
        assert found.error <= limit
        assert found.nbytes == nbytes


def test_plans_that_rounding_up_rules_out() -> None:
    """Every layer's error is a little above a bin, and together they fill the budget exactly."""
    count = 7
    budget = Budget(math.fsum([1 / count] * count))
    found = LGreco(bins=count * 3 - 1).propose(pairs(count, 1 / count), budget)
    assert found.nbytes == 10 * count


@pytest.mark.timing
@pytest.mark.parametrize(("choices", "limit"), [(20, 0.2), (100, 0.5)])
def test_400_layers_are_solved_in_time(choices: int, limit: float) -> None:
    """At the best of several runs."""
    for kind in ("monotone", "scattered"):
        layers = random_layers(1, 400, choices, kind)
        budget, taken = Budget.of(layers), []
        for _ in range(8):
            begun = time.perf_counter()
            LGreco().propose(layers, budget)
            taken.append(time.perf_counter() - begun)
        assert min(taken) <= limit


def test_coefficients_are_found_again() -> None:
    draw = np.random.default_rng(0)
    sent = draw.uniform(1e5, 1e6, (200, 4))
    truth = np.array([1.0, 3.0, 0.0, 4.0])
    spans = 0.01 + 1e-9 * sent @ truth + draw.normal(0, 1e-6, 200)
    found = time_weights(sent, spans)
    assert found == pytest.approx([0.5, 1.5, 0.01, 2.0], rel=0.02)


def test_none_is_below_zero() -> None:
    sent = np.random.default_rng(1).uniform(0, 1, (50, 3))
    found = time_weights(sent, sent @ np.array([1.0, -5.0, 1.0]))
    assert (found > 0).all()
    assert found[1] == 0.01
    assert time_weights(sent, -sent.sum(1)).tolist() == [1, 1, 1]
    sent[:, 1] = sent[:, 0] / 2 + sent[:, 1] / 10  # the others are fitted again without the second
    found = time_weights(sent, sent @ np.array([1.0, -0.4, 1.0]))
    assert found[0] == pytest.approx(0.8 * found[2], rel=0.03)
