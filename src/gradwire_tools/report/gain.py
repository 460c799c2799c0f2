"""A method's gain over the best 16-bit baseline: its utility (UTIL 1), and whether it is one.

    gain = time to a loss of the best 16-bit baseline / the method's

Times are medians over seeds; above 1 a method is faster. `by_seeds` judges the difference.
A time is known to the time between two evaluations. Composed times of all seeds rest on the same
few timed steps, so their mean's standard error counts, too, which no spread over seeds shows.

Less is better, and two cases are judged. A quantity has a spread of its own (the quartiles of a
step's time): two differ if their spreads do not overlap. Or it was measured with several seeds, the
same for both methods: they differ if the mean of the differences is farther from zero than the half
width of its 95 % confidence interval (Student's t). Differences that all have one sign, but vary
more than that, are not called noise: there are too few of them.
"""

from __future__ import annotations

import enum
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire_tools.bench.quantities import DASH, faster, than
from gradwire_tools.bench.train.rows import Baselines
from gradwire_tools.report.rows import Row, grouped

Times = Sequence[float | None]
# Of a method's times to a loss: the longest time between two evaluations, in seconds; and of
# composed times, the standard error of the mean timed step, relative to it.
Resolution = tuple[float, float]

_TIMED_STEPS = 24  # of rows that do not tell
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # by degrees of freedom


class Standing(enum.Enum):
    """How a method compares with a baseline; from UNJUDGED on, of times to a loss alone."""

    GAIN = "gain"  # less
    LOSS = "loss"
    NOISE = "within noise"
    FEW = "too few seeds to judge"
    SPREADLESS = "spread unknown"
    UNJUDGED = "not judged"  # one seed, or too few
    BAR = "the best 16-bit baseline"
    NEVER = "target not reached"
    ONLY = "reaches it, the 16-bit baselines do not"
    TIMING = "for timing only"
    UNKNOWN = "not known"  # no 16-bit baseline, or no target


Endings = dict[Standing, tuple[str, str]]  # of a clause, and of a cell
_ENDINGS = {
    Standing.GAIN: ("", ""),
    Standing.LOSS: ("", ""),
    Standing.FEW: (", and so with every seed; these are too few to judge", Standing.FEW.value),
    Standing.SPREADLESS: ("; the spread over seeds is unknown", Standing.SPREADLESS.value),
}


def by_spreads(mine: Sequence[float] | None, baseline: Sequence[float] | None) -> Standing:
    """Of two quantities with a spread each: (low, high)."""
    if not mine or not baseline:
        return Standing.SPREADLESS
    if mine[1] < baseline[0]:
        return Standing.GAIN
    return Standing.LOSS if mine[0] > baseline[1] else Standing.NOISE


def against(
    row: Row, baseline: Row | None, key: str, endings: Endings, of: str = ""
) -> tuple[str, str]:
    """A row's seconds under `key` against the baseline's, by the quartiles of both: `worded`.
    `of` stands before the baseline's name."""
    if baseline is None or row is baseline or not baseline[key] or row[key] is None:
        return "", DASH
    verdict = by_spreads(*(one.get(f"{key}_quartiles") for one in (row, baseline)))
    name = of + baseline["method"]
    if verdict is Standing.NOISE:
        return worded(verdict, f"about as fast as {name}", "", endings)
    compared, told = beside(row[key], baseline[key], name)
    return worded(verdict, told, compared, endings)


def of_step(row: Row, bar: Row | None) -> Gain | None:
    """Of a median step against that of the best 16-bit baseline, by the quartiles of both."""
    if bar is None or not row["step_seconds"] or not bar["step_seconds"]:
        return None
    if row is bar:
        return Gain(Standing.BAR, 1.0)
    standing = by_spreads(*(one.get("step_seconds_quartiles") for one in (row, bar)))
    standing = Standing.UNJUDGED if standing is Standing.SPREADLESS else standing
    return Gain(standing, bar["step_seconds"] / row["step_seconds"])


def beside(mine: float, baseline: float, name: str) -> tuple[str, str]:
    """A time against the baseline's: "2.50 times faster", and of what."""
    compared = faster(mine, baseline)
    return compared, than(compared, name)


def worded(verdict: Standing, told: str, compared: str, endings: Endings) -> tuple[str, str]:
    """A verdict as a clause, which begins with `told`, and as a cell of a table, which begins with
    `compared`."""
    ending, word = (_ENDINGS | endings)[verdict]
    return told + ending, ", ".join(filter(None, (compared, word)))


def paired(rows: Sequence[Mapping[str, Any]], key: str) -> list[list[float | None]]:
    """Of each summary row, `key` at the seeds that all the rows have, in one order.

    A row without `key` per seed has its median or mean alone, which is that of no seed.
    """
    found: list[dict[Any, float | None]] = []
    for row in rows:
        values = row.get(f"{key}_by_seed")
        if not values:
            found.append({None: row[key]})
            continue
        seeds = row.get("seeds") or ()
        known = len(set(seeds)) == len(seeds) == len(values)
        found.append(dict(zip(seeds if known else range(len(values)), values, strict=True)))
    shared = [seed for seed in found[0] if all(seed in one for one in found)] if found else []
    return [[one[seed] for seed in shared] for one in found]


def by_seeds(
    mine: Sequence[float | None], baseline: Sequence[float | None], resolution: float = 0.0
) -> Standing:
    """Of values with the same seeds, two or more; a mean difference below `resolution` is noise."""
    pairs = [
        (a, b) for a, b in zip(mine, baseline, strict=False) if a is not None and b is not None
    ]
    if len(pairs) < max(2, len(mine), len(baseline)):
        return Standing.SPREADLESS
    differences = [a - b for a, b in pairs]
    mean, half = statistics.mean(differences), half_width(differences)
    if abs(mean) <= resolution:
        return Standing.NOISE
    if abs(mean) <= half:
        one_sign = min(differences) > 0 or max(differences) < 0
        return Standing.FEW if one_sign else Standing.NOISE
    return Standing.GAIN if mean < 0 else Standing.LOSS


def half_width(differences: Sequence[float]) -> float:
    """Of the 95 % confidence interval of the mean of two differences or more."""
    freedom = len(differences) - 1
    t = _T95[freedom - 1] if freedom <= len(_T95) else 2.2
    return t * statistics.stdev(differences) / math.sqrt(len(differences))


@dataclass(frozen=True)
class Gain:
    """A standing, and the ratio of times; None where there is none."""

    standing: Standing
    ratio: float | None = None

    @property
    def text(self) -> str:
        """ "2.41 times faster"; in words alone without a ratio."""
        if self.standing in (Standing.GAIN, Standing.LOSS):
            return faster(1.0, self.ratio or 1.0)
        if self.standing is Standing.UNJUDGED and self.ratio is not None:
            return f"{faster(1.0, self.ratio)}, {self.standing.value}"
        return DASH if self.standing is Standing.UNKNOWN else self.standing.value


def known_to(resolved: Mapping[str, Resolution], times: Mapping[str, float]) -> Resolution:
    """To what the difference of two methods' times is known, in seconds each; exactly, where
    `resolved` lacks them."""
    both = [(*resolved.get(name, (0.0, 0.0)), time) for name, time in times.items()]
    return max(gap for gap, *_ in both), math.hypot(*(error * time for _, error, time in both))


def judged(
    found: Mapping[str, Times], resolved: Mapping[str, Resolution], timing_only: Sequence[str] = ()
) -> dict[str, Gain]:
    """The gain of each method.

    Args:
        found: each method's times to the target, one per seed, in the same order for all.
        resolved: to what each method's times are known.
        timing_only: methods that do not train a model.
    """
    bars = Baselines.among(found).sixteen_bits
    known = {name: _median(found[name]) for name in bars if name in found}
    reached = {name: time for name, time in known.items() if time}
    bar = min(reached, key=lambda name: reached[name]) if reached else None
    missed = bar is None and None in known.values()
    gains = {}
    for method, mine in found.items():
        median, ratio = _median(mine), None
        if method in timing_only:
            standing = Standing.TIMING
        elif not mine:
            standing = Standing.UNKNOWN  # no seed is the others', too
        elif median is None:
            standing = Standing.NEVER
        elif bar is None or not median:
            standing = Standing.ONLY if missed else Standing.UNKNOWN
        elif method == bar:
            standing, ratio = Standing.BAR, 1.0
        else:
            known_times = {method: median, bar: reached[bar]}
            standing = by_seeds(mine, found[bar], sum(known_to(resolved, known_times)))
            if standing in (Standing.FEW, Standing.SPREADLESS):
                standing = Standing.UNJUDGED
            ratio = reached[bar] / median
        gains[method] = Gain(standing, ratio)
    return gains


def of_summaries(
    summaries: Sequence[Row], evaluations: Sequence[Row], target: str | None = None
) -> dict[str, Gain]:
    """The gains of one run's summary rows: at its target, or at one of `bench.train.rows.TARGETS`,
    which all of them have."""
    if target is not None:
        key = "time_to_target_by_seed"
        summaries = [{**row, key: row["times_to_by_seed"][target]} for row in summaries]
    elif not summaries or summaries[0]["target"] is None:
        return {row["method"]: Gain(Standing.UNKNOWN) for row in summaries}
    methods = [row["method"] for row in summaries]
    found = dict(zip(methods, paired(summaries, "time_to_target"), strict=True))
    timing_only = [row["method"] for row in summaries if row.get("timing_only")]
    return judged(found, resolutions(summaries, evaluations), timing_only)


def resolutions(
    summaries: Sequence[Row], evaluations: Sequence[Row], at_target: bool = True
) -> dict[str, Resolution]:
    """Of each method's time to the target, else to any loss among the rows at hand. These may be
    fewer than the run's evaluations: at the target, the summary says how far apart these were."""
    gaps = _gaps(evaluations) | (_told_gaps(summaries) if at_target else {})
    timing = {row["method"]: _timing_error(row) for row in summaries}
    return {name: (gaps.get(name, 0.0), timing.get(name, 0.0)) for name in gaps | timing}


def _timing_error(row: Row) -> float:
    """Of a composed row, the standard error of the mean timed step, relative to it, by the bounds
    of the middle half of the steps; 0 of a row of a whole run, or without these bounds."""
    bounds, step = row.get("step_seconds_quartiles"), row["step_seconds"]
    if not row.get("composed") or not bounds or not step:
        return 0.0
    steps = row.get("timed_steps") or _TIMED_STEPS
    return float((bounds[1] - bounds[0]) / step / math.sqrt(steps))


def left_out(summaries: Sequence[Row], evaluations: Sequence[Row]) -> tuple[float, float] | None:
    """(longest time between two evaluations at hand, the same of the runs), of the method where
    they differ most; None if no evaluation was left out."""
    told = _told_gaps(summaries)
    both = [(here, told.get(method, here)) for method, here in _gaps(evaluations).items()]
    return max((pair for pair in both if pair[0] > 1.01 * pair[1]), default=None)


def _told_gaps(summaries: Sequence[Row]) -> dict[str, float]:
    key = "evaluation_gap_seconds"
    return {row["method"]: row[key] for row in summaries if row.get(key) is not None}


def _gaps(evaluations: Sequence[Row]) -> dict[str, float]:
    """Each method's longest time between two evaluations, of the rows at hand."""
    found: dict[str, float] = {}
    for (method, _), mine in grouped(evaluations, "method", "seed").items():
        at = sorted(row["seconds"] for row in mine)
        found[method] = max([found.get(method, 0.0), *(b - a for a, b in itertools.pairwise(at))])
    return found


def _median(values: Times) -> float | None:
    """The median; None if a seed has no value."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None
