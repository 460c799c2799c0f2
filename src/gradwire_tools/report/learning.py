"""The report on what training reaches: time to a loss, and loss after the same steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gradwire_tools.bench.quantities import DASH, digits, percent, plural, reach, seconds
from gradwire_tools.bench.train.rows import Baselines, length
from gradwire_tools.report import gain
from gradwire_tools.report.gain import Gain, Standing
from gradwire_tools.report.parts import Line, Lines, Question, Table, series, table
from gradwire_tools.report.rows import Row, grouped

MISSED = "not reached"
_WHOLE = "Time is rank 0's, evaluations excluded, start-up and compilation of kernels included."
_COMPOSED = (
    "Composed: times are those of mean timed steps; start-up and compilation of kernels are not "
    "included."
)
_BAND = "Mean over seeds; the band reaches from the least to the greatest."
_LOSSES = {
    Standing.GAIN: (", more than noise", "lower"),
    Standing.LOSS: (", more than noise: it costs accuracy here", "higher"),
    Standing.NOISE: (", which is within noise", ""),
    Standing.FEW: (", and so with every seed; these are too few to judge", ""),
}


def curves(evaluations: Sequence[Row], x: str = "seconds") -> list[Line]:
    """Each method's means over its seeds, to its own end, and the extremes of its losses. A step
    that a seed lacks, or where its loss was not finite, has no mean."""
    points = []
    for (method,), mine in grouped(evaluations, "method").items():
        seeds = len({row["seed"] for row in mine})
        for at in grouped(mine, "step").values():
            losses = [row["loss"] for row in at]
            whole = None not in losses and len(losses) == seeds
            of_seeds = [of(losses) if whole else None for of in (statistics.mean, min, max)]
            points.append((method, "", statistics.mean(row[x] for row in at), *of_seeds))
    return series(points)


def against_seconds(evaluations: Sequence[Row], target: float | None) -> Lines:
    """Loss against training time; a point where a mean first meets the target."""
    drawn = []
    for line in curves(evaluations):
        points = zip(line.x, line.y, strict=True)
        met = [(x, y) for x, y in points if target is not None and y is not None and y <= target]
        drawn.append(replace(line, mark=met[0] if met else None))
    rule = None if target is None else (target, f"target {digits(target, 4)}")
    return Lines(drawn, "training time, s", "validation loss, nats", rule)


def time_to_loss(evaluations: Sequence[Row], summaries: Sequence[Row]) -> Question:
    """Time to the target loss, against the 16-bit baseline."""
    target = summaries[0]["target"] if summaries else None
    baselines = Baselines.of_rows(summaries)
    baseline = baselines.best(summaries, "time_to_target")
    resolved = gain.resolutions(summaries, evaluations)
    answers, shown = _by_seeds(
        summaries, "time_to_target", seconds, lambda row: _time_verdict(row, baseline, resolved)
    )
    composed = evaluations and evaluations[0].get("composed")
    return Question(
        "How long until the model reaches the baseline's loss?",
        [_target(summaries), *answers] if summaries else [],
        against_seconds(evaluations, target) if evaluations else None,
        f"{_BAND} Points: the first evaluation at or below the target. "
        + (_COMPOSED if composed else _WHOLE),
        table(
            shown,
            "method | time to target = time | over seeds | against {name} = against",
            name=baselines.against(baseline),
        ),
    )


def _by_seeds(
    summaries: Sequence[Row],
    key: str,
    form: Callable[[float], str],
    verdict: Callable[[Row], tuple[str, str]],
) -> tuple[list[str], list[Row]]:
    """Answers, and rows with cells: of `key` over seeds, and by the verdict's clause and cell."""
    answers, shown = [], []
    for row in summaries:
        if row.get("timing_only"):
            shown.append({"method": row["method"], "against": "for timing only"})
            continue
        clause, cell = verdict(row)
        if clause:
            answers.append(f"{row['method']} {clause}.")
        values = [one for one in row.get(f"{key}_by_seed") or () if one is not None]
        cells = {"time": time_reached(row), "over seeds": reach(values, form), "against": cell}
        shown.append({**row, **cells})
    return answers, shown


def time_reached(row: Row) -> str:
    """The time to the target, in words if there is none to tell."""
    time = row["time_to_target"]
    if time is None:
        return MISSED if row["target"] is not None else DASH
    return seconds(time) if time else "before training"


def _target(summaries: Sequence[Row]) -> str:
    target, origin = summaries[0]["target"], summaries[0].get("target_from", "given")
    if target is None:
        return f"There is no target loss: it was to come from {origin}."
    whose = "as given" if origin == "given" else f"the last loss of {origin}, plus the tolerance"
    if " at " in origin:
        whose = f"that of {origin}"
    elif any(0 in (row.get("time_to_target_by_seed") or ()) for row in summaries):
        whose += ", which the untrained model meets, so times to it say nothing"
    return f"The target is a validation loss of {digits(target, 4)}: {whose}."


def _time_verdict(
    row: Row, baseline: Row | None, resolved: Mapping[str, gain.Resolution]
) -> tuple[str, str]:
    """A time to the target against the baseline's: as a clause, and for a table. Of fp32, which is
    compared with 16 bit, only that it does not reach the target is an answer."""
    cell = DASH
    if baseline is not None and row is not baseline and baseline["time_to_target"]:
        if row["time_to_target"] is not None:
            clause, cell = _time_compared(row, baseline, resolved)
            return "" if row["method"] == Baselines.of_rows([row]).full else clause, cell
        cell = MISSED
    if time_reached(row) != MISSED:
        return "", cell
    times = row.get("time_to_target_by_seed") or ()
    missed = times.count(None) if times else 0
    some = f" with {missed} of {plural(len(times), 'seed')}" if missed < len(times) else ""
    return f"did not reach the target in {length([row])}{some}", cell


def _time_compared(
    row: Row, baseline: Row, resolved: Mapping[str, gain.Resolution]
) -> tuple[str, str]:
    mine, theirs = gain.paired((row, baseline), "time_to_target")
    time, other, name = row["time_to_target"], baseline["time_to_target"], baseline["method"]
    gap, timing = gain.known_to(resolved, {row["method"]: time, name: other})
    verdict = gain.by_seeds(mine, theirs, gap + timing)
    compared, told = gain.beside(time, other, name)
    told = f"reaches it {told}"
    if one_seed(row):
        return told, compared
    why = ", within noise"
    if verdict is Standing.NOISE:
        told, compared = f"reaches it in about the time of {name}", ""
        if gain.by_seeds(mine, theirs) is not Standing.NOISE:
            why += f": evaluations are up to {seconds(gap)} apart"
            if timing:
                why += f", and by the timed steps this difference is known to {seconds(timing)}"
    return gain.worded(verdict, told, compared, {Standing.NOISE: (why, verdict.value)})


def what_is_learned(evaluations: Sequence[Row], summaries: Sequence[Row]) -> Question:
    """Loss after the same number of steps, against fp32."""
    full = Baselines.of_rows([*summaries, *evaluations]).full
    baseline = next((row for row in summaries if row["method"] == full), None)
    answers, shown = _by_seeds(
        summaries, "final_loss", lambda loss: digits(loss, 4), lambda r: loss_verdict(r, baseline)
    )
    drawn = [  # the others lie on a wide one
        replace(line, wide=line.label == full) for line in curves(evaluations, "step")
    ]
    made = table(
        shown,
        "method | last loss = final_loss | over seeds | against {full} = against | "
        "{metric} = final_metric",
        full=full,
        metric=str(summaries[0].get("metric_name") or "metric") if summaries else "",
    )
    chart = Lines(drawn, "step", "validation loss, nats") if drawn else None
    return Question("Does compression change what is learned?", answers, chart, _BAND, made)


def one_seed(row: Row) -> bool:
    """Whether a summary is of one seed, so that its section says that nothing is judged."""
    return len(row.get("seeds") or ()) == 1


def loss_verdict(row: Row, baseline: Row | None) -> tuple[str, str]:
    """A summary's last loss against fp32's, with the half width of the 95 % confidence interval of
    the difference: as a clause, and for a table."""
    if row["final_loss"] is None:
        return "ended with a loss that is not finite, with one seed or more", "not finite"
    if baseline is None or row is baseline or not baseline["final_loss"]:
        return "", DASH
    ratio = row["final_loss"] / baseline["final_loss"]
    change, side = percent(ratio), "below" if ratio < 1 else "above"
    told = f"ends with a loss {change.lstrip('+-')} {side} that of {baseline['method']}"
    if change == "0.00 %":
        told = f"ends with the loss of {baseline['method']}, to 0.01 %"
    if one_seed(row):
        return told, change
    mine, theirs = gain.paired((row, baseline), "final_loss")
    verdict = Standing.NOISE if ratio == 1 else gain.by_seeds(mine, theirs)
    clause, cell = gain.worded(verdict, told, change, _LOSSES)
    pairs = zip(mine, theirs, strict=True)
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    if verdict is Standing.SPREADLESS or len(differences) < 2:
        return clause, cell
    known = f"{digits(100 * gain.half_width(differences) / baseline['final_loss'], 2)} %"
    return f"{clause} (known to ±{known})", cell.replace(change, f"{change} ±{known}")


_SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)

Run = dict[int, list[Row]]  # a method's evaluations by seed, in the order of steps
Targets = dict[int, dict[int, float]]  # by step, the reference's loss with each seed


def at_targets(evaluations: Sequence[Row], summaries: Sequence[Row] = ()) -> Question | None:
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
    resolved = gain.resolutions(summaries, evaluations, at_target=False)
    by_target = [
        gain.judged({name: _times(mine, losses) for name, mine in whole.items()}, resolved)
        for losses in targets.values()
    ]
    gains = {name: [at[name] for at in by_target] for name in whole}
    answers = [
        f"{name} {_told(mine)}." for name, mine in gains.items() if name not in baselines.names
    ]
    missing = gain.left_out(summaries, evaluations)
    if missing is not None:
        answers.append(
            "Some of the runs' evaluations are not among these rows. So a time to one of these "
            f"targets is known to {seconds(missing[0])} only, not to {seconds(missing[1])} as the "
            "time to the run's own target, and more differences are within noise."
        )
    lacking = sorted(runs.keys() - whole)
    answers += [f"{name} is not here: it lacks seeds of {reference}." for name in lacking]
    headings = ["method"]
    for step, losses in targets.items():
        headings.append(f"loss {digits(statistics.mean(losses.values()), 4)}, step {step}")
    drawn = series(
        (name, "", step, one.ratio)
        for name, mine in gains.items()
        for step, one in zip(targets, mine, strict=True)
    )
    return Question(
        "How much time does a method save, at which target?",
        answers,
        Lines(
            [line for line in drawn if any(line.y)],
            f"target: loss of {reference} at this step",
            "utility",
            (1.0, "best 16-bit baseline"),
            log_y=True,
        ),
        f"The targets are the losses of {reference} at these steps, with each seed. Utility is the "
        "time to a target of the best 16-bit baseline, divided by the method's: how many times "
        "faster it is, if above 1. A line ends where a method does not reach the target.",
        Table(headings, [[name, *(one.text for one in mine)] for name, mine in gains.items()]),
    )


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
    Standing.GAIN: "is {} times faster at",
    Standing.LOSS: "is {} times slower at",
    Standing.NOISE: "is within noise at",
    Standing.UNJUDGED: "is not judged, for want of seeds, at",
    Standing.NEVER: "does not reach",
    Standing.ONLY: "alone, without the 16-bit baselines, reaches",
    Standing.UNKNOWN: "cannot be compared at",
}


def _told(gains: Sequence[Gain]) -> str:
    """Gains and losses of a method over the targets, in a clause."""
    parts = []
    for standing, words in _WORDS.items():
        ratios = [one.ratio or 1.0 for one in gains if one.standing is standing]
        if not ratios:
            continue
        factors = [max(ratio, 1 / ratio) for ratio in ratios]
        low, high = digits(min(factors)), digits(max(factors))
        word = words.format(low if low == high else f"{low} to {high}")
        parts.append(f"{word} {len(ratios)} of {plural(len(gains), 'target')}")
    return "; ".join(parts)
