"""Whether a difference is more than noise; for quantities of which less is better.

Two cases are known. A quantity has a spread of its own (the quartiles of a step's time): two differ
if their spreads do not overlap. Or it was measured with several seeds, and both methods had the
same ones: then they differ if the mean of the differences is farther from zero than the half width
of its 95 % confidence interval (Student's t). Differences that all have one sign, but vary more
than that, are not called noise: there are too few of them. Where neither spread is known, nothing
is judged.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Spread = tuple[float, float]

_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # by degrees of freedom


class Verdict(enum.Enum):
    """What may be said of a method against a baseline."""

    LESS = "less"
    MORE = "more"
    NOISE = "within noise"
    FEW = "too few seeds to judge"
    UNKNOWN = "spread unknown"


def spread_of(row: Mapping[str, Any], key: str) -> Spread | None:
    """The bounds of the middle half, where the row has them."""
    found = row.get(key)
    return (float(found[0]), float(found[1])) if found else None


def by_spreads(mine: Spread | None, baseline: Spread | None) -> Verdict:
    """Of two quantities with a spread each."""
    if mine is None or baseline is None:
        return Verdict.UNKNOWN
    if mine[1] < baseline[0]:
        return Verdict.LESS
    return Verdict.MORE if mine[0] > baseline[1] else Verdict.NOISE


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
) -> Verdict:
    """Of values with the same seeds, two or more; a mean difference below `resolution` is noise."""
    pairs = [
        (a, b) for a, b in zip(mine, baseline, strict=False) if a is not None and b is not None
    ]
    if len(pairs) < max(2, len(mine), len(baseline)):
        return Verdict.UNKNOWN
    differences = [a - b for a, b in pairs]
    mean = statistics.mean(differences)
    if abs(mean) <= resolution:
        return Verdict.NOISE
    freedom = len(differences) - 1
    t = _T95[freedom - 1] if freedom <= len(_T95) else 2.2
    half = t * statistics.stdev(differences) / math.sqrt(len(differences))
    if abs(mean) <= half:
        one_sign = min(differences) > 0 or max(differences) < 0
        return Verdict.FEW if one_sign else Verdict.NOISE
    return Verdict.LESS if mean < 0 else Verdict.MORE
