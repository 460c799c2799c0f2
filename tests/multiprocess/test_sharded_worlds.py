"""Sharded modules on three, four and five ranks.

The other files of sharded modules have two ranks, or say otherwise.
"""

from __future__ import annotations

from functools import partial

import pytest
import test_sharded as gradients
import test_sharded_differences as differences
import test_sharded_weights as weights
import torch

from ranks import Check, together

pytestmark = pytest.mark.multiprocess

CHECKS: dict[int, list[Check]] = {
    3: [
        partial(weights.weights_are_alike, dtypes=(torch.bfloat16,), given=weights.GIVEN[:1]),
        weights.bytes_are_those_of_the_formula,
        partial(differences.nothing_drifts, weights=differences.FOUR, dtype=torch.bfloat16),
    ],
    4: [
        partial(gradients.exactly_what_was_asked_for, codec="qsgd", reshard=2),
        partial(weights.it_does_not_matter_when_weights_are_resharded, reshard=2),
    ],
}
MORE: dict[int, list[Check]] = {
    3: [
        partial(gradients.exactly_what_was_asked_for, codec="qsgd", reshard=True),
        gradients.nothing_is_lost,
        weights.weights_are_alike,
        partial(weights.losses_are_those_of_fsdp, dtype=torch.bfloat16, tolerance=1e-3),
        partial(differences.nothing_drifts, weights=differences.NEAREST, dtype=None),
        differences.one_version_is_sent_once,
    ],
    4: [partial(gradients.exactly_what_was_asked_for, codec="identity", reshard=True)],
    5: [weights.weights_are_alike, weights.bytes_are_those_of_the_formula],
}


@pytest.mark.parametrize("ranks", CHECKS)
def test_laws_hold_on_several_ranks(ranks: int) -> None:
    together(ranks, *CHECKS[ranks])


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", MORE)
def test_more_laws_hold_on_several_ranks(ranks: int) -> None:
    together(ranks, *MORE[ranks])


@pytest.mark.exhaustive
def test_differences_do_not_drift_on_five_ranks() -> None:
    together(5, differences.one_version_is_sent_once)
    for given in (differences.FOUR, differences.NEAREST):
        for dtype in (None, torch.bfloat16):
            together(5, partial(differences.nothing_drifts, weights=given, dtype=dtype))
