"""Flexible: a density and a collective for top-k, from measured costs (ARTOPK 3-E).

A *candidate* is a density that was tried: what compressing took, and its *gain*, E|gc|^2 / E|ge|^2,
with ge what a rank fed in (its gradient and residual) and gc what it sent of that. Communication is
not measured but computed from latency and bandwidth, for the fastest collective of Eqs. 4 and 5
(Table I): N ranks, M bytes of gradient, `alpha` seconds of latency and `beta` seconds per byte.

    all_gather   alpha log2 N + 2 M density beta (N - 1)           values, and their indices
    art_ring     alpha (2 (N-1) + log2 N) + M density beta (2 (N-1)/N + log2 N)
    art_tree     3 alpha log2 N + 3 M density beta log2 N          a broadcast, then an all-reduce

So a search after a change of the network needs no new trial.

    1. NSGA-II (pymoo) minimises (compression seconds, communication seconds, 1 / gain) over the
       densities between the least and the largest candidate. Between candidates, compression and
       gain are interpolated: straight lines of logarithms
    2. each objective is scaled to [0, 1] over the front that it finds
    3. the knee: the point of the front with the least Euclidean distance from (0, 0, 0)

The paper names knee point and NSGA-II, not how the knee is found: 2 and 3 are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire.errors import ConfigError

DENSITIES = (0.1, 0.033, 0.011, 0.004, 0.001)  # by thirds, as the paper rounds them
_POPULATION = 40
_GENERATIONS = 30


@dataclass(frozen=True)
class Candidate:
    """A density that was tried.

    Attributes:
        density: the share of values that is sent.
        seconds: of compression, per step.
        gain: above 0, and at most 1 but for rounding.
    """

    density: float
    seconds: float
    gain: float


@dataclass(frozen=True)
class SparseChoice:
    """A density, how it is sent, and what is expected.

    Attributes:
        collective: "all_gather", "art_ring" or "art_tree".
        compression, communication: seconds per step.
    """

    density: float
    collective: str
    compression: float
    communication: float
    gain: float

    def __str__(self) -> str:
        return (
            f"density {self.density:g} by {self.collective} ({1e3 * self.communication:.3g} ms of "
            f"communication, {1e3 * self.compression:.3g} ms of compression, gain {self.gain:.3g})"
        )


def search(
    candidates: Sequence[Candidate],
    ranks: int,
    nbytes: float,
    alpha: float,
    beta: float,
    seed: int = 0,
) -> SparseChoice:
    """The knee of the front; the same for the same arguments.

    Args:
        nbytes: of the gradient, uncompressed.
        alpha: seconds of latency.
        beta: seconds per byte.

    Raises:
        ConfigError: fewer than two candidates, numbers that are not above 0, or no pymoo.
    """
    known = sorted(candidates, key=lambda one: one.density)
    if len({one.density for one in known}) < 2:
        raise ConfigError("flexible: give two candidate densities or more")
    for one in known:
        if not (0 < one.density <= 1 and one.seconds > 0 and one.gain > 0):
            raise ConfigError(f"flexible: {one}: density, seconds and gain must be above 0")
    places = np.log([one.density for one in known])

    def objectives(place: np.ndarray) -> np.ndarray:
        compression, gain = (
            np.exp(np.interp(place, places, np.log([getattr(one, name) for one in known])))
            for name in ("seconds", "gain")
        )
        communication = [
            min(sparse_collectives(ranks, nbytes, float(c), alpha, beta).values())
            for c in np.exp(place).clip(max=1.0)
        ]
        return np.stack([compression, communication, 1 / gain], axis=1)

    front = _front(objectives, float(places[0]), float(places[-1]), seed)
    at = front[knee(objectives(front))]
    # Three digits, as people write densities; within the candidates' range.
    density = float(np.clip(float(f"{np.exp(at):.3g}"), known[0].density, known[-1].density))
    compression, communication, inverse = objectives(np.log([density]))[0]
    collective = sparse_collective(ranks, nbytes, density, alpha, beta)
    return SparseChoice(density, collective, *map(float, (compression, communication, 1 / inverse)))


def sparse_collectives(
    ranks: int, nbytes: float, density: float, alpha: float, beta: float
) -> dict[str, float]:
    """Seconds of each way to exchange the largest values of a gradient of `nbytes`.

    Raises:
        ConfigError: there is no rank, or the density is not above 0 and at most 1.
    """
    if ranks < 1 or not 0 < density <= 1:
        raise ConfigError(
            f"{ranks} ranks, density {density}: give 1 rank or more, and a density up to 1"
        )
    deep, others = math.log2(ranks), ranks - 1
    sent = nbytes * density * beta
    return {
        "all_gather": alpha * deep + 2 * sent * others,
        "art_ring": alpha * (2 * others + deep) + sent * (2 * others / ranks + deep),
        "art_tree": 3 * alpha * deep + 3 * sent * deep,
    }


def sparse_collective(ranks: int, nbytes: float, density: float, alpha: float, beta: float) -> str:
    """The fastest of them."""
    costs = sparse_collectives(ranks, nbytes, density, alpha, beta)
    return min(costs, key=costs.__getitem__)


def knee(front: np.ndarray) -> int:
    """The row of a front (points x objectives, less is better) that is nearest to the best of all
    objectives, each scaled to [0, 1]; of equals the first."""
    least, most = front.min(0), front.max(0)
    scaled = (front - least) / np.where(most > least, most - least, 1.0)
    return int(np.linalg.norm(scaled, axis=1).argmin())


def _front(objectives: Any, low: float, high: float, seed: int) -> np.ndarray:
    """The points that NSGA-II leaves, ends included, in order."""
    nsga2, problem, minimize = _pymoo()

    class Densities(problem):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__(n_var=1, n_obj=3, xl=low, xu=high)

        def _evaluate(self, x: np.ndarray, out: dict[str, Any], *args: Any, **more: Any) -> None:
            out["F"] = objectives(x[:, 0])

    method = nsga2(pop_size=_POPULATION)
    found = minimize(Densities(), method, ("n_gen", _GENERATIONS), seed=seed, verbose=False)
    points: np.ndarray = np.unique(np.append(np.asarray(found.X).reshape(-1), [low, high]))
    values = objectives(points)
    worse = [any((o <= v).all() and (o < v).any() for o in values) for v in values]
    left: np.ndarray = points[~np.array(worse)]
    return left


def check_pymoo() -> None:
    """Raise ConfigError if pymoo is missing."""
    _pymoo()


def _pymoo() -> tuple[Any, Any, Any]:
    try:
        from pymoo.algorithms.moo.nsga2 import NSGA2
        from pymoo.core.problem import Problem
        from pymoo.optimize import minimize
    except ImportError as error:
        raise ConfigError(
            f'flexible needs pymoo, which is missing ({error}): pip install "gradwire[adapt]"'
        ) from error
    return NSGA2, Problem, minimize
