"""Sharded modules on three, four and five ranks; and their states, saved on some, loaded on others.

The other files of sharded modules have two ranks, or say otherwise.
"""

from __future__ import annotations

from functools import partial

import pytest
import test_sharded as gradients
import test_sharded_differences as differences
import test_sharded_faults as faults
import test_sharded_levels as levels
import test_sharded_weights as weights
import torch
from together import Check, together

pytestmark = pytest.mark.multiprocess

CHECKS: dict[int, list[Check]] = {
    3: [
        partial(weights.weights_are_alike, dtypes=(torch.bfloat16,), given=weights.GIVEN[:1]),
        weights.bytes_are_those_of_the_formula,
        partial(differences.nothing_drifts, weights=differences.FOUR, dtype=torch.bfloat16),
        *(partial(faults.an_exception_in_forward_is_told, records=r) for r in (True, False)),
        *(
            partial(faults.a_forward_that_all_ranks_leave_early_needs_no_recovery, keep=keep)
            for keep in ("payload", "reference")
        ),
        faults.ranks_that_leave_a_forward_at_unlike_places_are_told,
        *(partial(faults.one_evaluates_a_batch_more, keep=k) for k in ("payload", "none")),
        faults.an_exception_where_others_gather_is_told,
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


def test_states_load_at_another_number_of_ranks() -> None:
    two, two_levels = (of[0] for of in together(2, differences.saves, levels.saves))
    together(
        3,
        partial(differences.loads, saved=two, alone=False),
        partial(differences.loads, saved=two, alone=True),
        partial(levels.loads, state=two_levels),
    )


@pytest.mark.exhaustive
def test_states_load_at_fewer_ranks() -> None:
    three, three_levels = (of[0] for of in together(3, differences.saves, levels.saves))
    together(
        2,
        partial(differences.loads, saved=three, alone=False),
        partial(levels.loads, state=three_levels),
    )
    together(1, partial(levels.loads, state=three_levels))
