"""The report on utility: the gain over the best 16-bit baseline at several target losses.

Curves of loss against time may cross, so one target does not tell which method is better (UTIL
2.2). The targets are fp32's losses at a fifth, two fifths, ... of its run, with each seed; without
fp32, those of the first method.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from gradwire_tools.bench.quantities import digits, plural, seconds
from gradwire_tools.bench.train.baselines import Baselines
from gradwire_tools.report import svg
from gradwire_tools.report.gain import Gain, Standing, judged, left_out, resolutions
from gradwire_tools.report.kinds import Row
from gradwire_tools.report.lines import Axes, Line, lines
from gradwire_tools.report.parts import Figure, Question, Table
from gradwire_tools.report.rows import grouped

TITLE = "How much time does a method save, at which target?"
_SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)

Run = dict[int, list[Row]]  # a method's evaluations by seed, in the order of steps
Targets = dict[int, dict[int, float]]  # by step, the reference's loss with each seed


def question(evaluations: Sequence[Row], summaries: Sequence[Row] = ()) -> Question | None:
    """Of methods that train the model. None where the rows have no 16-bit baseline or no target."""
    runs: dict[str, Run] = {}
    for (method, seed), mine in grouped(evaluations, "method", "seed").items():
        runs.setdefault(method, {})[seed] = sorted(mine, key=lambda row: int(row["step"]))
    baselines = Baselines.of_rows(evaluations)
    if not any(name in runs for name in baselines.sixteen_bits):
        return None
    reference = baselines.full if baselines.full in runs else next(iter(runs))
    targets = _targets(runs[reference])
    if not targets:
        return None
    whole = {name: mine for name, mine in runs.items() if mine.keys() >= runs[reference].keys()}
    resolved = resolutions(summaries, evaluations, at_target=False)
    gains = [
        judged({name: _times(mine, losses) for name, mine in whole.items()}, resolved)
        for losses in targets.values()
    ]
    headings = [
        f"loss {digits(statistics.mean(losses.values()), 4)}, step {step}"
        for step, losses in targets.items()
    ]
    cells = [[name, *(at[name].text for at in gains)] for name in whole]
    answers = [
        f"{name}: {_told([at[name] for at in gains])}."
        for name in whole
        if name not in baselines.names
    ]
    missing = left_out(summaries, evaluations)
    if missing is not None:
        answers.append(
            "Some of the runs' evaluations are not among these rows. So a time to one of these "
            f"targets is known to {seconds(missing[0])} only, not to {seconds(missing[1])} as the "
            "time to the run's own target, and more differences are within noise."
        )
    lacking = sorted(runs.keys() - whole)
    answers += [f"{name} is not here: it lacks seeds of {reference}." for name in lacking]
    caption = (
        f"The targets are the losses of {reference} at these steps, with each seed. Utility is the "
        "time to a target of the best 16-bit baseline, divided by the method's: how many times "
        "faster it is, if above 1. A line ends where a method does not reach the target."
    )
    strokes = svg.strokes(whole)
    drawn = [
        Line(name, strokes[name], list(targets), [at[name].ratio for at in gains])
        for name in whole
        if any(at[name].ratio is not None for at in gains)
    ]
    axes = Axes(
        f"target: loss of {reference} at this step", "utility", TITLE,
        rule=(1.0, "best 16-bit baseline"), log_y=True,
    )  # fmt: skip
    figure = Figure(caption, lines(drawn, axes))
    return Question(TITLE, answers, figure, Table(["method", *headings], cells))


def _targets(reference: Run) -> Targets:
    """Of different steps, without those where a seed's loss is not known."""
    found: Targets = {}
    for share in _SHARES:
        at = {
            seed: next(r for r in reversed(mine) if r["step"] <= max(share * last, mine[0]["step"]))
            for seed, mine in reference.items()
            for last in (mine[-1]["step"],)
        }
        step = max(row["step"] for row in at.values())
        losses = {seed: row["loss"] for seed, row in at.items()}
        if step > 0 and None not in losses.values():
            found.setdefault(step, losses)
    return found


def _times(mine: Run, losses: Mapping[int, float]) -> list[float | None]:
    """With each seed of the target, the time of the first evaluation that meets it."""
    return [
        next(
            (r["seconds"] for r in mine[seed] if r["loss"] is not None and r["loss"] <= loss), None
        )
        for seed, loss in losses.items()
    ]


_WORDS = {
    Standing.GAIN: ("saves time at", "faster"),
    Standing.LOSS: ("costs time at", "slower"),
    Standing.NOISE: ("is within noise at", ""),
    Standing.UNJUDGED: ("is not judged, for want of seeds, at", ""),
    Standing.NEVER: ("does not reach", ""),
    Standing.ONLY: ("alone, without the 16-bit baselines, reaches", ""),
    Standing.UNKNOWN: ("cannot be compared at", ""),
}


def _told(gains: Sequence[Gain]) -> str:
    """Gains and losses of a method over the targets, in a clause."""
    parts = []
    for standing, (word, compared) in _WORDS.items():
        ratios = [gain.ratio for gain in gains if gain.standing is standing]
        if not ratios:
            continue
        part = f"{word} {len(ratios)} of {plural(len(gains), 'target')}"
        if compared:
            known = [max(ratio or 1.0, 1 / (ratio or 1.0)) for ratio in ratios]
            low, high = digits(min(known)), digits(max(known))
            part += f" ({low if low == high else f'{low} to {high}'} times {compared})"
        parts.append(part)
    return "; ".join(parts)
