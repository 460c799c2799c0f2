"""The report on what training reaches: time to a loss, and loss after the same steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gradwire_tools.bench.lengths import length
from gradwire_tools.bench.quantities import (
    DASH,
    digits,
    faster,
    percent,
    plural,
    reach,
    seconds,
    than,
)
from gradwire_tools.bench.train.baselines import Baselines
from gradwire_tools.report import gain, svg
from gradwire_tools.report.kinds import Row
from gradwire_tools.report.lines import Axes, Line, lines
from gradwire_tools.report.noise import Verdict, by_seeds, paired
from gradwire_tools.report.parts import Figure, Question, table
from gradwire_tools.report.rows import grouped

TITLE = "How long until the model reaches the baseline's loss?"
_WHOLE = "Time is rank 0's, evaluations excluded, start-up and compilation of kernels included."
_COMPOSED = (
    "Composed: times are those of mean timed steps; start-up and compilation of kernels are not "
    "included."
)
_LEARNED = "Does compression change what is learned?"
_TIMING = "for timing only"
MISSED = "not reached"
_FEW = ", and so with every seed; these are too few to judge"
_UNKNOWN = "; the spread over seeds is unknown"


@dataclass(frozen=True)
class Curve:
    """A method's evaluations over its seeds: at each step the means, and the losses' extremes."""

    steps: Sequence[float]
    seconds: Sequence[float]
    loss: Sequence[float | None]
    low: Sequence[float | None]
    high: Sequence[float | None]


def curves(evaluations: Sequence[Row]) -> dict[str, Curve]:
    """Each method's curve, to its own end. A step that a seed lacks, or where its loss was not
    finite, has no mean."""
    found = {}
    for (method,), mine in grouped(evaluations, "method").items():
        seeds, points = len({row["seed"] for row in mine}), []
        for (step,), rows in sorted(grouped(mine, "step").items()):
            losses = [row["loss"] for row in rows]
            whole = None not in losses and len(losses) == seeds
            of_seeds = [of(losses) if whole else None for of in (statistics.mean, min, max)]
            points.append((step, statistics.mean(row["seconds"] for row in rows), *of_seeds))
        found[method] = Curve(*zip(*points, strict=True))
    return found


def against_seconds(evaluations: Sequence[Row], target: float | None) -> str:
    """The figure of loss against training time; a point where a mean first meets the target."""
    return _figure(evaluations, target, by_time=True)


def _figure(evaluations: Sequence[Row], target: float | None, by_time: bool) -> str:
    strokes = svg.strokes(row["method"] for row in evaluations)
    full = Baselines.of_rows(evaluations).full
    drawn = []
    for method, curve in curves(evaluations).items():
        x = curve.seconds if by_time else curve.steps
        points = [(a, b) for a, b in zip(x, curve.loss, strict=True) if b is not None]
        met = [point for point in points if target is not None and point[1] <= target]
        wide, mark = method == full and not by_time, met[0] if met and by_time else None
        line = Line(method, strokes[method], x, curve.loss, curve.low, curve.high)
        drawn.append(replace(line, wide=wide, mark=mark))  # the others lie on a wide one
    axes = Axes(
        x="training time, s" if by_time else "step",
        y="validation loss, nats",
        title="Validation loss against " + ("training time" if by_time else "steps"),
        rule=(target, f"target {digits(target, 4)}") if target is not None and by_time else None,
    )
    return lines(drawn, axes)


def time_to_loss(evaluations: Sequence[Row], summaries: Sequence[Row]) -> Question:
    """Time to the target loss, against the 16-bit baseline."""
    target = summaries[0]["target"] if summaries else None
    baselines = Baselines.of_rows(summaries)
    baseline = baselines.best(summaries, "time_to_target")
    resolved = gain.resolutions(summaries, evaluations)
    answers = [_target(summaries)] if summaries else []
    shown = []
    for row in summaries:
        word, clause = _time_verdict(row, baseline, resolved)
        if row.get("timing_only"):
            shown.append({"method": row["method"], "against": _TIMING})
            continue
        time = time_reached(row)
        if time == MISSED:
            answers.append(
                f"{row['method']} did not reach the target in {length([row])}{_some(row)}."
            )
        elif clause and row["method"] != baselines.full:
            answers.append(f"{row['method']} {clause}.")
        known = [time for time in row.get("time_to_target_by_seed") or () if time is not None]
        seeds = reach(known, seconds)
        shown.append({"method": row["method"], "time": time, "seeds": seeds, "against": word})
    figure = None
    if evaluations:
        caption = (
            "Mean over seeds; the band reaches from the least to the greatest. Points: the first "
            "evaluation at or below the target. "
        ) + (_COMPOSED if evaluations[0].get("composed") else _WHOLE)
        figure = Figure(caption, against_seconds(evaluations, target))
    columns = "method | time to target = time | over seeds = seeds | against {name} = against"
    name = baselines.against(baseline)
    return Question(TITLE, answers, figure, table(shown, columns, name=name))


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
    if " at " in origin:
        return f"The target is a validation loss of {digits(target, 4)}: that of {origin}."
    whose = "as given" if origin == "given" else f"the last loss of {origin}, plus the tolerance"
    met = [row for row in summaries if 0 in (row.get("time_to_target_by_seed") or ())]
    untrained = ", which the untrained model meets, so times to it say nothing" if met else ""
    return f"The target is a validation loss of {digits(target, 4)}: {whose}{untrained}."


def _some(row: Row) -> str:
    times = row.get("time_to_target_by_seed") or ()
    reached = sum(time is not None for time in times)
    return f" with {len(times) - reached} of {plural(len(times), 'seed')}" if reached else ""


def _time_verdict(
    row: Row, baseline: Row | None, resolved: Mapping[str, gain.Resolution]
) -> tuple[str, str]:
    """For the table and for the answer; empty where there is nothing to compare."""
    if baseline is None or row is baseline or not baseline["time_to_target"]:
        return DASH, ""
    if row["time_to_target"] is None:
        return MISSED, ""
    mine, theirs = paired((row, baseline), "time_to_target")
    ours, its = (resolved[one["method"]] for one in (row, baseline))
    gap, timing = gain.known_to(ours, row["time_to_target"], its, baseline["time_to_target"])
    verdict = by_seeds(mine, theirs, gap + timing)
    near = verdict is Verdict.NOISE and by_seeds(mine, theirs) is not Verdict.NOISE
    why = f": evaluations are up to {seconds(gap)} apart" if near else ""
    if near and timing:
        why += f", and by the timed steps this difference is known to {seconds(timing)}"
    compared = faster(row["time_to_target"], baseline["time_to_target"])
    told = f"reaches it {than(compared, str(baseline['method']))}"
    if one_seed(row):
        return compared, told
    noise = f"reaches it in about the time of {baseline['method']}, within noise{why}"
    return {
        Verdict.LESS: (compared, told),
        Verdict.MORE: (compared, told),
        Verdict.NOISE: (verdict.value, noise),
        Verdict.FEW: (f"{compared}, {verdict.value}", told + _FEW),
        Verdict.UNKNOWN: (f"{compared}, {verdict.value}", told + _UNKNOWN),
    }[verdict]


def what_is_learned(evaluations: Sequence[Row], summaries: Sequence[Row]) -> Question:
    """Loss after the same number of steps, against fp32."""
    full = Baselines.of_rows(summaries).full
    baseline = {row["method"]: row for row in summaries}.get(full)
    answers, shown = [], []
    for row in summaries:
        if row.get("timing_only"):
            shown.append({"method": row["method"], "against": _TIMING})
            continue
        word, clause = loss_verdict(row, baseline)
        if clause:
            answers.append(f"{row['method']} {clause}.")
        known = [loss for loss in row.get("final_loss_by_seed") or () if loss is not None]
        seeds = reach(known, lambda loss: digits(loss, 4))
        shown.append({**row, "seeds": seeds, "against": word})
    figure = None
    if evaluations:
        caption = "Mean over seeds; the band reaches from the least to the greatest."
        figure = Figure(caption, _figure(evaluations, None, by_time=False))
    metric = str(summaries[0].get("metric_name") or "metric") if summaries else ""
    columns = "method | last loss = final_loss | over seeds = seeds | against {full} = against | "
    columns += "{metric} = final_metric"
    return Question(_LEARNED, answers, figure, table(shown, columns, full=full, metric=metric))


def one_seed(row: Row) -> bool:
    """Whether a summary is of one seed, so that its section says that nothing is judged."""
    return len(row.get("seeds") or ()) == 1


def loss_verdict(row: Row, baseline: Row | None) -> tuple[str, str]:
    """A summary's last loss against fp32's: for a table, and as a clause."""
    if row["final_loss"] is None:
        return "not finite", "ended with a loss that is not finite, with one seed or more"
    if baseline is None or row is baseline or not baseline["final_loss"]:
        return DASH, ""
    ratio = row["final_loss"] / baseline["final_loss"]
    change = percent(ratio)
    told = f"ends with a loss {change.lstrip('+-')} {'below' if ratio < 1 else 'above'} that of "
    told = f"{told}{baseline['method']}"
    if change == "0.00 %":
        told = f"ends with the loss of {baseline['method']}, to 0.01 %"
    mine, theirs = paired((row, baseline), "final_loss")
    verdict = by_seeds(mine, theirs)
    if row["final_loss"] == baseline["final_loss"]:
        verdict = Verdict.NOISE
    if one_seed(row):
        return change, told
    return {
        Verdict.LESS: (f"{change}, lower", f"{told}, more than noise"),
        Verdict.MORE: (f"{change}, higher", f"{told}, more than noise: it costs accuracy here"),
        Verdict.NOISE: (f"{change}, {verdict.value}", f"{told}, which is within noise"),
        Verdict.FEW: (f"{change}, {verdict.value}", told + _FEW),
        Verdict.UNKNOWN: (f"{change}, {verdict.value}", told + _UNKNOWN),
    }[verdict]
