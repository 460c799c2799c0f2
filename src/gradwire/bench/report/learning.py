"""The report on what training reaches: time to a loss, and loss after the same steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradwire.bench.baselines import Baselines
from gradwire.bench.report import gain, svg
from gradwire.bench.report.kinds import Row
from gradwire.bench.report.lengths import length
from gradwire.bench.report.lines import Axes, Line, lines
from gradwire.bench.report.noise import Verdict, by_seeds, paired
from gradwire.bench.report.parts import Cell, Figure, Question, Table
from gradwire.bench.report.quantities import (
    DASH,
    digits,
    faster,
    percent,
    plural,
    seconds,
    than,
)
from gradwire.bench.report.rows import grouped

TITLE = "How long until the model reaches the baseline's loss?"
_WHOLE = "Time is rank 0's, evaluations excluded, start-up and compilation of kernels included."
_COMPOSED = (
    "Composed: times are those of mean timed steps; start-up and compilation of kernels are not "
    "included."
)
_LEARNED = "Does compression change what is learned?"


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
        seeds = len({row["seed"] for row in mine})
        by_step = {step: rows for (step,), rows in grouped(mine, "step").items()}
        steps = sorted(by_step)
        at = [by_step[step] for step in steps]
        losses = [[row["loss"] for row in rows] for rows in at]
        whole = [None not in some and len(some) == seeds for some in losses]
        found[method] = Curve(
            steps,
            [statistics.mean(row["seconds"] for row in rows) for rows in at],
            [statistics.mean(some) if ok else None for some, ok in zip(losses, whole, strict=True)],
            [min(some) if ok else None for some, ok in zip(losses, whole, strict=True)],
            [max(some) if ok else None for some, ok in zip(losses, whole, strict=True)],
        )
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
        drawn.append(
            Line(
                method,
                strokes[method],
                x,
                curve.loss,
                curve.low,
                curve.high,
                wide=method == full and not by_time,  # others lie on it
                mark=met[0] if met and by_time else None,
            )
        )
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
    answers, table = [_target(summaries)] if summaries else [], []
    resolved = gain.resolutions(summaries, evaluations)
    for row in summaries:
        word, clause = _time_verdict(row, baseline, resolved)
        if row.get("timing_only"):
            table.append([Cell(row["method"]), *(Cell(DASH, True),) * 2, Cell("for timing only")])
            continue
        if row["time_to_target"] is None and target is not None:
            answers.append(
                f"{row['method']} did not reach the target in {length([row])}{_some(row)}."
            )
        elif clause and row["method"] != baselines.full:
            answers.append(f"{row['method']} {clause}.")
        times = [time for time in row.get("time_to_target_by_seed") or () if time is not None]
        spread = f"{seconds(min(times))} to {seconds(max(times))}" if len(times) > 1 else DASH
        reached = row["time_to_target"] is not None
        text = seconds(row["time_to_target"]) if reached else "not reached" if target else DASH
        table.append([Cell(row["method"]), Cell(text, True), Cell(spread, True), Cell(word)])
    figure = None
    if evaluations:
        caption = (
            "Mean over seeds; the band reaches from the least to the greatest. Points: the first "
            "evaluation at or below the target. "
        ) + (_COMPOSED if evaluations[0].get("composed") else _WHOLE)
        figure = Figure(caption, against_seconds(evaluations, target))
    headings = ["method", "time to target", "over seeds", f"against {baselines.against(baseline)}"]
    return Question(TITLE, answers, figure, Table(headings, table) if table else None)


def _target(summaries: Sequence[Row]) -> str:
    target, origin = summaries[0]["target"], summaries[0].get("target_from", "given")
    if target is None:
        return f"There is no target loss: it was to come from {origin}."
    if " at " in origin:
        return f"The target is a validation loss of {digits(target, 4)}: that of {origin}."
    whose = "as given" if origin == "given" else f"the last loss of {origin}, plus the tolerance"
    return f"The target is a validation loss of {digits(target, 4)}: {whose}."


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
        return "not reached", ""
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
    clause = {
        Verdict.LESS: told,
        Verdict.MORE: told,
        Verdict.NOISE: f"reaches it in about the time of {baseline['method']}, within noise{why}",
        Verdict.FEW: f"{told}, and so with every seed; these are too few to judge",
        Verdict.UNKNOWN: f"{told}; the spread over seeds is unknown",
    }[verdict]
    cell = {Verdict.LESS: compared, Verdict.MORE: compared, Verdict.NOISE: verdict.value}
    return cell.get(verdict, f"{compared}, {verdict.value}"), clause


def what_is_learned(evaluations: Sequence[Row], summaries: Sequence[Row]) -> Question:
    """Loss after the same number of steps, against fp32."""
    full = Baselines.of_rows(summaries).full
    baseline = {row["method"]: row for row in summaries}.get(full)
    answers, table = [], []
    for row in summaries:
        if row.get("timing_only"):
            table.append(
                [Cell(row["method"]), *(Cell(DASH),) * 2, Cell("for timing only"), Cell(DASH)]
            )
            continue
        word, clause = loss_verdict(row, baseline)
        if clause:
            answers.append(f"{row['method']} {clause}.")
        losses = [loss for loss in _losses(row) if loss is not None]
        spread = (
            f"{digits(min(losses), 4)} to {digits(max(losses), 4)}" if len(losses) > 1 else DASH
        )
        table.append(
            [
                Cell(row["method"]),
                Cell(digits(row["final_loss"], 4), True),
                Cell(spread, True),
                Cell(word),
                Cell(digits(row.get("final_metric"), 4), True),
            ]
        )
    figure = None
    if evaluations:
        caption = "Mean over seeds; the band reaches from the least to the greatest."
        figure = Figure(caption, _figure(evaluations, None, by_time=False))
    metric = str(summaries[0].get("metric_name") or "metric") if summaries else ""
    headings = ["method", "last loss", "over seeds", f"against {full}", metric]
    return Question(_LEARNED, answers, figure, Table(headings, table) if table else None)


def one_seed(row: Row) -> bool:
    """Whether a summary is of one seed, so that its section says that nothing is judged."""
    return len(row.get("seeds") or ()) == 1


def _losses(row: Row) -> list[float | None]:
    return row.get("final_loss_by_seed") or [row["final_loss"]]


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
    clause = {
        Verdict.LESS: f"{told}, more than noise",
        Verdict.MORE: f"{told}, more than noise: it costs accuracy here",
        Verdict.NOISE: f"{told}, which is within noise",
        Verdict.FEW: f"{told}, and so with every seed; these are too few to judge",
        Verdict.UNKNOWN: f"{told}; the spread over seeds is unknown",
    }[verdict]
    word = {Verdict.LESS: "lower", Verdict.MORE: "higher"}.get(verdict, verdict.value)
    return f"{change}, {word}", clause
