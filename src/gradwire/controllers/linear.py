"""Linear: bits by the rank of gradient magnitude over size (CGX 5, before Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradwire.controllers.layer import Budget, Layer
from gradwire.controllers.levels import Ladders
from gradwire.controllers.policy import Policy


@dataclass(frozen=True)
class Linear(Policy):
    """Layers sorted by norm / size: the first gets the lowest level, the last the highest, the
    others in between by their place; see `controllers.levels`."""

    name = "linear"

    def choose(self, layers: Sequence[Layer], budget: Budget) -> Sequence[int] | None:
        ratios = [one.norm / max(one.numel, 1) for one in layers]
        heights = np.empty(len(layers))
        heights[np.argsort(ratios, kind="stable")] = np.linspace(0, 1, len(layers))
        ladders = Ladders(layers, budget)
        ladders.offer(heights)
        return ladders.best
