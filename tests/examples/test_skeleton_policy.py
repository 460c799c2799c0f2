"""The tests that a policy should pass, on the skeleton. Copy this file with it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from controllers.random_tables import KINDS, best_cost, random_layers
from gradwire import ConfigError
from gradwire.controllers import Budget
from gradwire.controllers.error import METRICS
from gradwire.controllers.layer import plan_cost, plan_error

EXAMPLE = Path(__file__).parents[2] / "examples" / "skeleton_policy.py"
Steepest: Any = runpy.run_path(str(EXAMPLE))["Steepest"]


@pytest.mark.parametrize("metric", METRICS)
def test_it_keeps_to_its_budget(metric: str) -> None:
    for seed in range(60):
        layers = random_layers(seed, 1 + seed % 9, 2 + seed % 7, KINDS[seed % len(KINDS)])
        budget = Budget.of(layers, 1.0, metric)
        found = Steepest().choose(layers, budget)
        assert found is not None
        assert plan_error(layers, found, metric) <= budget.error
        assert found == Steepest().choose(layers, budget)
        exact = [int(one.errors.argmin()) for one in layers]
        least = plan_error(layers, exact, metric)
        assert Steepest().choose(layers, Budget(0.9 * least, metric)) is None or not least


def test_it_saves_much_of_what_can_be_saved() -> None:
    """Against the best of all plans, on tables as codecs have them."""
    saved, best = 0.0, 0.0
    for seed in range(40):
        layers = random_layers(seed, 4, 6, "monotone")
        budget = Budget.of(layers)
        uniform = plan_cost(layers, [one.reference for one in layers])
        saved += 1 - plan_cost(layers, Steepest().propose(layers, budget).choices) / uniform
        best += 1 - best_cost(layers, budget) / uniform
    assert 0.5 * best < saved <= best


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="spend=0"):
        Steepest(spend=0)
