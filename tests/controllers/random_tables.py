"""Random tables of choices, and the best plan by trying all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from gradwire.aggregators import Dense
from gradwire.controllers import Budget, Layer
from gradwire.controllers.layer import plan_cost, plan_error

KINDS = ("monotone", "scattered", "ragged", "weighted", "equal")


def random_layers(seed: int, count: int, choices: int, kind: str) -> list[Layer]:
    """Tables of this many layers with at most this many choices.

    Args:
        kind: "monotone": more bytes err less, as codecs do; "scattered": bytes and errors are
            unrelated; "ragged": numbers of choices differ; "weighted": layers' bytes have weights;
            "equal": many choices have the same bytes or errors.
    """
    draw = np.random.default_rng(seed)
    made = []
    for i in range(count):
        some = int(draw.integers(1, choices + 1)) if kind == "ragged" else choices
        numel = int(draw.lognormal(8, 2)) + 1
        nbytes = draw.integers(1, 1000, some)
        errors = draw.lognormal(0, 2, some)
        if kind in ("monotone", "weighted"):
            nbytes = numel * np.arange(1, some + 1)
            errors = draw.lognormal(0, 2) * np.exp2(-8 * np.arange(some) / some)
        if kind == "equal":
            nbytes, errors = draw.integers(1, 4, some), draw.integers(0, 3, some).astype(float)
            errors[0] += 1  # a layer without any error keeps its reference
        weight = float(draw.lognormal()) if kind == "weighted" else 1.0
        norm = float(draw.lognormal())
        made.append(
            Layer(
                f"layer{i}", numel, (Dense(),) * some, nbytes.astype(np.int64), errors,
                int(draw.integers(some)), norm, norm / 2, weight,
            )
        )  # fmt: skip
    return made


def best_cost(layers: Sequence[Layer], budget: Budget) -> float:
    """The least cost of a plan within the budget, by trying all; infinite if there is none."""
    plans = itertools.product(*(range(len(one.methods)) for one in layers))
    within = (p for p in plans if plan_error(layers, p, budget.metric) <= budget.error)
    return min((plan_cost(layers, p) for p in within), default=math.inf)
