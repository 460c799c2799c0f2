"""KMeans: layers of like size and sensitivity share a level (CGX Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradwire.controllers.layer import Budget, Layer
from gradwire.controllers.levels import Ladders
from gradwire.controllers.policy import Policy
from gradwire.errors import ConfigError

_ROUNDS = 50


@dataclass(frozen=True)
class KMeans(Policy):
    """Clusters of layers, and a level for each.

    A layer is the point (size, norm of its largest values), both scaled to [0, 1] over the layers.
    Clusters are sorted by their centroids' norm - size; the first gets the lowest level. The paper
    has a cluster for each number of bits; here 2 to `clusters` of them are tried, with the windows
    of `controllers.levels`.

    Args:
        clusters: at most.
        seed: of the first centroids.

    Raises:
        ConfigError: an option has no legal value.
    """

    clusters: int = 8
    seed: int = 0

    name = "kmeans"

    def __post_init__(self) -> None:
        if type(self.clusters) is not int or self.clusters < 1:
            raise ConfigError(f"KMeans: clusters={self.clusters!r}: give a whole number, 1 or more")
        if type(self.seed) is not int or self.seed < 0:
            raise ConfigError(f"KMeans: seed={self.seed!r}: give a whole number of 0 or more")

    def choose(self, layers: Sequence[Layer], budget: Budget) -> Sequence[int] | None:
        sizes = _scaled([one.numel for one in layers])
        points = np.stack([sizes, _scaled([one.top_norm for one in layers])], axis=1)
        ladders = Ladders(layers, budget)
        ladders.offer(np.zeros(len(layers)))
        for count in range(2, min(self.clusters, len(layers)) + 1):
            centroids, members = clustered(points, count, self.seed)
            order = np.argsort(centroids[:, 1] - centroids[:, 0], kind="stable")
            heights = np.empty(count)
            heights[order] = np.linspace(0, 1, count)
            ladders.offer(heights[members])
        return ladders.best


def clustered(points: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Lloyd's algorithm from the centroids of k-means++.

    Args:
        points: float64[n, dimensions].

    Returns: (centroids, float64[count, dimensions]; the cluster of each point, int64[n]).
    """
    centroids = _first(points, count, np.random.default_rng(seed))
    members = np.full(len(points), -1)
    for _ in range(_ROUNDS):
        nearest = _squares(points, centroids).argmin(axis=1)
        if (nearest == members).all():
            break
        members = nearest
        for k in range(count):
            if (members == k).any():
                centroids[k] = points[members == k].mean(axis=0)
    return centroids, members


def _first(points: np.ndarray, count: int, draw: np.random.Generator) -> np.ndarray:
    chosen = [int(draw.integers(len(points)))]
    while len(chosen) < count:
        far = _squares(points, points[chosen]).min(axis=1)
        shares = far / far.sum() if far.any() else np.full(len(points), 1 / len(points))
        chosen.append(int(draw.choice(len(points), p=shares)))
    return points[chosen].copy()


def _squares(points: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Squares of distances, float64[points, centroids]."""
    apart: np.ndarray = points[:, None] - centroids[None]
    squares: np.ndarray = (apart * apart).sum(axis=2)
    return squares


def _scaled(values: Sequence[float]) -> np.ndarray:
    """To [0, 1] over the layers; zeros if all are equal."""
    found = np.array(values, np.float64)
    span = np.ptp(found)
    return (found - found.min()) / span if span else np.zeros(len(found))
