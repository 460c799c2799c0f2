"""A method's gain over the best 16-bit baseline: its utility (UTIL 1), and whether it is one.

    gain = time to a loss of the best 16-bit baseline / the method's

Times are medians over seeds; above 1 a method saves time. `noise.by_seeds` judges the difference.
"""

from __future__ import annotations

import enum
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradwire.bench.baselines import SIXTEEN_BITS
from gradwire.bench.report.kinds import Row
from gradwire.bench.report.noise import Verdict, by_seeds
from gradwire.bench.report.quantities import DASH, digits
from gradwire.bench.report.rows import grouped

Times = Sequence[float | None]


class Standing(enum.Enum):
    """How a method compares with the best 16-bit baseline."""

    BAR = "the best 16-bit baseline"
    GAIN = "gain"
    LOSS = "loss"
    NOISE = "within noise"
    UNJUDGED = "not judged"  # one seed, or too few
    NEVER = "target not reached"
    ONLY = "reaches it, the 16-bit baselines do not"
    TIMING = "for timing only"
    UNKNOWN = "not known"  # no 16-bit baseline, or no target


@dataclass(frozen=True)
class Gain:
    """A standing, and the ratio of times; None where there is none."""

    standing: Standing
    ratio: float | None = None

    @property
    def text(self) -> str:
        """ "2.41×, gain"; in words alone without a ratio."""
        if self.ratio is None:
            return DASH if self.standing is Standing.UNKNOWN else self.standing.value
        return f"{times(self.ratio)}, {self.standing.value}"


def times(ratio: float) -> str:
    """ "2.41×"."""
    return f"{digits(ratio)}×"


def judged(
    found: Mapping[str, Times], gaps: Mapping[str, float], timing_only: Sequence[str] = ()
) -> dict[str, Gain]:
    """The gain of each method.

    Args:
        found: each method's times to the target, one per seed, in the same order for all.
        gaps: the longest time between two evaluations of a method.
        timing_only: methods that do not train a model.
    """
    known = {name: _median(found[name]) for name in SIXTEEN_BITS if name in found}
    reached = {name: time for name, time in known.items() if time}
    bar = min(reached, key=lambda name: reached[name]) if reached else None
    gains = {}
    for method, mine in found.items():
        median = _median(mine)
        if method in timing_only:
            gains[method] = Gain(Standing.TIMING)
        elif median is None:
            gains[method] = Gain(Standing.NEVER)
        elif bar is None or not median:
            missed = bool(known) and None in known.values() and bar is None
            gains[method] = Gain(Standing.ONLY if missed else Standing.UNKNOWN)
        elif method == bar:
            gains[method] = Gain(Standing.BAR, 1.0)
        else:
            resolution = max(gaps.get(method, 0.0), gaps.get(bar, 0.0))
            verdict = by_seeds(mine, found[bar], resolution)
            gains[method] = Gain(_STANDINGS[verdict], reached[bar] / median)
    return gains


_STANDINGS = {
    Verdict.LESS: Standing.GAIN,
    Verdict.MORE: Standing.LOSS,
    Verdict.NOISE: Standing.NOISE,
    Verdict.FEW: Standing.UNJUDGED,
    Verdict.UNKNOWN: Standing.UNJUDGED,
}


def of_summaries(summaries: Sequence[Row], evaluations: Sequence[Row]) -> dict[str, Gain]:
    """The gains at the target of one run's summary rows."""
    if not summaries or summaries[0]["target"] is None:
        return {row["method"]: Gain(Standing.UNKNOWN) for row in summaries}
    found = {
        row["method"]: row.get("time_to_target_by_seed") or [row["time_to_target"]]
        for row in summaries
    }
    timing_only = [row["method"] for row in summaries if row.get("timing_only")]
    return judged(found, longest_gaps(evaluations), timing_only)


def longest_gaps(evaluations: Sequence[Row]) -> dict[str, float]:
    """Each method's longest time between two evaluations: what a time to a loss is known to."""
    gaps: dict[str, float] = {}
    for (method, _), mine in grouped(evaluations, "method", "seed").items():
        at = sorted(row["seconds"] for row in mine)
        longest = max((b - a for a, b in itertools.pairwise(at)), default=0.0)
        gaps[method] = max(longest, gaps.get(method, 0.0))
    return gaps


def _median(values: Times) -> float | None:
    """The median; None if a seed has no value."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def strength(ratio: float, full: float = 4.0) -> float:
    """How far a ratio is from 1, the same for 1/ratio: 0 to 1, which `full` and beyond have."""
    return min(1.0, abs(math.log(ratio)) / math.log(full))
