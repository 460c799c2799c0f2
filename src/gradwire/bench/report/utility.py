"""The report on utility: the gain over the best 16-bit baseline at several target losses.

Curves of loss against time may cross, so one target does not tell which method is better (UTIL
2.2). The targets are fp32's losses at a fifth, two fifths, ... of its run, with each seed; without
fp32, those of the first method.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.bench.baselines import Baselines
from gradwire.bench.report import svg
from gradwire.bench.report.gain import Gain, Standing, at_hand, judged, left_out
from gradwire.bench.report.kinds import Row
from gradwire.bench.report.lines import Axes, Line, lines
from gradwire.bench.report.parts import Figure, Question, Table
from gradwire.bench.report.quantities import digits, plural, seconds
from gradwire.bench.report.rows import grouped

TITLE = "How much time does a method save, at which target?"
_SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)

Runs = dict[str, dict[int, list[Row]]]  # evaluations by method and seed, by step


@dataclass(frozen=True)
class LossTarget:
    """The reference's loss with each seed, at a step of its run."""

    step: int
    losses: dict[int, float]


def question(evaluations: Sequence[Row], summaries: Sequence[Row] = ()) -> Question | None:
    """Of methods that train the model. None where the rows have no 16-bit baseline or no target."""
    runs = _runs(evaluations)
    baselines = Baselines.of_rows(evaluations)
    if not runs or not any(name in runs for name in baselines.sixteen_bits):
        return None
    reference = baselines.full if baselines.full in runs else next(iter(runs))
    targets = _targets(runs[reference])
    if not targets:
        return None
    whole = {name: mine for name, mine in runs.items() if mine.keys() >= runs[reference].keys()}
    resolved = at_hand(summaries, evaluations)
    gains = [
        judged({name: _times(mine, target) for name, mine in whole.items()}, resolved)
        for target in targets
    ]
    headings = ["method"]
    headings += [
        f"loss {digits(statistics.mean(target.losses.values()), 4)}, step {target.step}"
        for target in targets
    ]
    cells = [[name, *(at[name].text for at in gains)] for name in whole]
    answers = [
        f"{name}: {_told([at[name] for at in gains])}."
        for name in whole
        if name not in baselines.names
    ]
    told = [f"{name} is not here: it lacks seeds of {reference}." for name in runs.keys() - whole]
    missing = left_out(summaries, evaluations)
    if missing is not None:
        told.append(
            "Some of the runs' evaluations are not among these rows. So a time to one of these "
            f"targets is known to {seconds(missing[0])} only, not to {seconds(missing[1])} as the "
            "time to the run's own target, and more differences are within noise."
        )
    caption = (
        f"The targets are the losses of {reference} at these steps, with each seed. Utility is the "
        "time to a target of the best 16-bit baseline, divided by the method's: how many times "
        "faster it is, if above 1. A line ends where a method does not reach the target."
    )
    figure = Figure(caption, _figure(targets, gains, reference))
    return Question(TITLE, [*answers, *sorted(told)], figure, Table(headings, cells))


def _runs(evaluations: Sequence[Row]) -> Runs:
    found: Runs = {}
    for (method, seed), mine in grouped(evaluations, "method", "seed").items():
        found.setdefault(method, {})[seed] = sorted(mine, key=lambda row: int(row["step"]))
    return found


def _targets(reference: dict[int, list[Row]]) -> list[LossTarget]:
    """Of different steps, without those where a seed's loss is not known."""
    found: dict[int, LossTarget] = {}
    for share in _SHARES:
        at = {
            seed: next(r for r in reversed(mine) if r["step"] <= max(share * last, mine[0]["step"]))
            for seed, mine in reference.items()
            for last in (mine[-1]["step"],)
        }
        step = max(row["step"] for row in at.values())
        losses = {seed: row["loss"] for seed, row in at.items()}
        if step > 0 and None not in losses.values():
            found.setdefault(step, LossTarget(step, losses))
    return list(found.values())


def _times(mine: dict[int, list[Row]], target: LossTarget) -> list[float | None]:
    """With each seed of the target, the time of the first evaluation that meets it."""
    return [
        next(
            (r["seconds"] for r in mine[seed] if r["loss"] is not None and r["loss"] <= loss), None
        )
        for seed, loss in target.losses.items()
    ]


def _told(gains: Sequence[Gain]) -> str:
    """Gains and losses of a method over the targets, in a clause."""
    count = len(gains)
    words = {
        Standing.GAIN: "saves time at",
        Standing.LOSS: "costs time at",
        Standing.NOISE: "is within noise at",
        Standing.UNJUDGED: "is not judged, for want of seeds, at",
        Standing.NEVER: "does not reach",
        Standing.ONLY: "alone, without the 16-bit baselines, reaches",
        Standing.UNKNOWN: "cannot be compared at",
    }
    parts = []
    for standing, word in words.items():
        mine = [gain for gain in gains if gain.standing is standing]
        if not mine:
            continue
        ratios = [gain.ratio for gain in mine if gain.ratio is not None]
        among = f" ({_range(standing, ratios)})" if standing in _FASTER and ratios else ""
        parts.append(f"{word} {len(mine)} of {plural(count, 'target')}{among}")
    return "; ".join(parts)


_FASTER = {Standing.GAIN: "faster", Standing.LOSS: "slower"}


def _range(standing: Standing, ratios: Sequence[float]) -> str:
    times = [1 / ratio if standing is Standing.LOSS else ratio for ratio in ratios]
    low, high = digits(min(times)), digits(max(times))
    return f"{low if low == high else f'{low} to {high}'} times {_FASTER[standing]}"


def _figure(targets: Sequence[LossTarget], gains: Sequence[dict[str, Gain]], reference: str) -> str:
    strokes = svg.strokes(gains[0])
    steps = [float(target.step) for target in targets]
    drawn = [
        Line(name, strokes[name], steps, [at[name].ratio for at in gains])
        for name in gains[0]
        if any(at[name].ratio is not None for at in gains)
    ]
    axes = Axes(
        f"target: loss of {reference} at this step", "utility", TITLE,
        rule=(1.0, "best 16-bit baseline"), log_y=True,
    )  # fmt: skip
    return lines(drawn, axes)
