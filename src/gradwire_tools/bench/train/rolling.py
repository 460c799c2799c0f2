"""Rolling averages of a score, and when a run has stopped improving (UTIL 2.2 and 3)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def rolling(values: Sequence[float], window: int) -> list[float]:
    """At each place, the mean of the last `window` values up to it, fewer at the beginning."""
    return [
        statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)
    ]


def stalled(averages: Sequence[float], patience: int) -> bool:
    """Whether the last `patience` averages are all at or above the least one before them.

    One that is not finite is no improvement.
    """
    before, last = averages[:-patience], averages[-patience:]
    if not before:
        return False
    least = min((a for a in before if math.isfinite(a)), default=math.inf)
    return not any(a < least for a in last)
