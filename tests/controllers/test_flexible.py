"""Flexible: the knee of compression, communication and gain, on networks that are known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gradwire.aggregators import ARTopK, LWTopK
from gradwire.controllers.flexible import DENSITIES, Candidate, knee, search, sparse_collectives
from rooms.flexible import ALGORITHMS, method_of, selected_from

pytest.importorskip("pymoo")

NBYTES = 1e8


def candidates(power: float = 0.3) -> list[Candidate]:
    return [Candidate(c, 0.01 + 0.02 * c, c**power) for c in DENSITIES]


def test_candidates_are_thirds() -> None:
    assert DENSITIES[0] == 0.1
    assert DENSITIES[-1] == 0.001
    ratios = [a / b for a, b in itertools.pairwise(DENSITIES)]
    assert all(2.7 < ratio < 4.1 for ratio in ratios)


def test_the_knee_is_nearest_to_the_best_of_all() -> None:
    front = np.array([[0.0, 100.0], [1.0, 20.0], [2.0, 10.0], [10.0, 0.0]])
    assert knee(front) == 1  # (0.1, 0.2); the ends have distance 1
    assert knee(np.array([[1.0, 5.0], [2.0, 5.0]])) == 0  # an objective that does not vary


def test_a_gain_that_density_does_not_change_leaves_the_sparsest() -> None:
    flat = [Candidate(c, 0.01 + 0.02 * c, 0.5) for c in DENSITIES]
    assert search(flat, 8, NBYTES, 1e-3, 8e-9).density == 0.001


def test_compression_and_communication_that_cost_the_same_leave_the_densest() -> None:
    free = [Candidate(c, 0.01, c**0.3) for c in DENSITIES]
    assert search(free, 8, NBYTES, 1e-3, 1e-30).density == 0.1


def test_the_choice_is_the_knee_of_a_fine_grid() -> None:
    known = candidates()
    found = search(known, 8, NBYTES, 1e-3, 8e-9)
    grid = np.geomspace(0.001, 0.1, 400)
    places = np.log([c.density for c in reversed(known)])
    gain = np.exp(np.interp(np.log(grid), places, np.log([c.gain for c in reversed(known)])))
    seconds = np.exp(np.interp(np.log(grid), places, np.log([c.seconds for c in reversed(known)])))
    sent = [min(sparse_collectives(8, NBYTES, c, 1e-3, 8e-9).values()) for c in grid]
    best = grid[knee(np.stack([seconds, sent, 1 / gain], axis=1))]
    assert found.density == pytest.approx(best, rel=0.1)
    assert found.gain == pytest.approx(found.density**0.3, rel=0.01)
    assert found == search(known, 8, NBYTES, 1e-3, 8e-9)


def test_the_collective_follows_the_network() -> None:
    fast = search(candidates(), 8, 5e8, 5e-2, 8e-12)
    slow = search(candidates(), 8, 5e8, 1e-5, 8e-8)
    assert fast.collective == "all_gather"  # latency: the fewest steps
    assert slow.collective == "art_ring"  # bytes: the fewest
    assert "by art_ring" in str(slow)


@pytest.mark.parametrize("made", [ARTopK, LWTopK])
@pytest.mark.parametrize(("scope", "lengths"), [("layer", [3, 5]), ("model", [8])])
def test_all_collectives_select_over_the_same_values(
    made: type, scope: str, lengths: list[int]
) -> None:
    base = made(0.01, values="fp32", scope=scope)
    assert selected_from(base, [3, 5]) == lengths
    for collective in ALGORITHMS:
        found = method_of(base, 0.1, collective)
        assert isinstance(found, LWTopK if collective == "all_gather" else ARTopK)
        assert (found.density, found.values, found.scope) == (0.1, "fp32", scope)
