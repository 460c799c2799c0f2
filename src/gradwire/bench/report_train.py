"""The report's part on `bench train`: curves, one table a run, and what they say in sentences."""

from __future__ import annotations

from typing import Any

from gradwire.bench import plots
from gradwire.bench.baselines import FULL, SIXTEEN_BIT
from gradwire.bench.report import Cell, Figure, Section, Table
from gradwire.bench.report_format import digits, number, seconds, size, times

Row = dict[str, Any]


def sections(rows: list[Row]) -> list[Section]:
    """One section per task, network and number of ranks."""
    runs: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        runs.setdefault((row["task"], row["net"], row["ranks"]), []).append(row)
    return [_section(*key, rows=mine) for key, mine in runs.items()]


def _section(task: str, net: str, ranks: int, *, rows: list[Row]) -> Section:
    evaluations = [row for row in rows if row["row"] == "evaluation"]
    summaries = [row for row in rows if row["row"] == "summary"]
    network = "loopback, nothing shaped" if net == "none" else net
    figures = []
    if evaluations:
        curves = plots.curves(evaluations, _target(summaries))
        figures.append(Figure("Validation loss against training time, and against steps.", curves))
    if summaries:
        bars = plots.step_times(summaries)
        text = "A step's time: what computing takes, and what communicating adds."
        figures.append(Figure(text, bars))
    return Section(
        title=f"Training {task}: {ranks} ranks, {network}",
        findings=findings(summaries),
        figures=figures,
        tables=[_table(summaries)] if summaries else [],
    )


def _target(summaries: list[Row]) -> float | None:
    return summaries[0]["target"] if summaries else None


def findings(summaries: list[Row]) -> list[str]:
    """What the summary rows say, losses included, in the order that matters: time to target."""
    if not summaries:
        return []
    by_method = {row["method"]: row for row in summaries}
    found = []
    target = _target(summaries)
    reached = [row for row in summaries if row["time_to_target"] is not None]
    if target is not None and reached:
        best = min(reached, key=lambda row: float(row["time_to_target"]))
        text = f"{best['method']} is first to the target loss of {digits(target, 4)}: "
        text += seconds(best["time_to_target"])
        others = [row for row in reached if row is not best]
        told = [f"{row['method']} takes {seconds(row['time_to_target'])}" for row in others]
        found.append(text + (f"; {', '.join(told)}." if told else "."))
    for row in summaries:
        if target is not None and row["time_to_target"] is None:
            found.append(f"{row['method']} did not reach the target in {row['steps']} steps.")
    sixteen = by_method.get(SIXTEEN_BIT)
    for row in summaries:
        if row["method"].startswith("gradwire"):
            against = _ratio(row, sixteen, "step_seconds")
            if against is not None:
                verdict = "faster than" if against < 1 else "no faster than"
                found.append(
                    f"{row['method']} takes {against:.2f} of the step time of {SIXTEEN_BIT}: "
                    f"{verdict} 16 bit here."
                )
    return found


def _table(summaries: list[Row]) -> Table:
    by_method = {row["method"]: row for row in summaries}
    metric = summaries[0].get("metric_name", "metric")
    headings = [
        "method",
        "step",
        "ideal step",
        f"of {SIXTEEN_BIT}'s step",
        "sent a rank",
        f"loss after {summaries[0]['steps']} steps",
        "against fp32's loss",
        metric,
        f"time to loss {digits(_target(summaries), 4)}",
        "memory beyond DDP",
    ]
    rows = []
    for row in summaries:
        mine = row["method"].startswith("gradwire")
        against = _ratio(row, by_method.get(SIXTEEN_BIT), "step_seconds")
        rows.append(
            [
                Cell(row["method"]),
                number(seconds(row["step_seconds"])),
                number(seconds(row["ideal_step_seconds"])),
                times(against, 1.0 if mine else None),
                number(size(row["wire_bytes"])),
                number(digits(row["final_loss"], 4)),
                _relative(row, by_method.get(FULL)),
                number(digits(row["final_metric"], 4)),
                _time_to_target(row),
                number(size(row["peak_extra_bytes"])),
            ]
        )
    caption = "Step times are medians; bytes are what a rank sent in all its steps."
    return Table(caption, headings, rows)


def _time_to_target(row: Row) -> Cell:
    if row["time_to_target"] is None:
        return number("not reached", "bad")
    return number(seconds(row["time_to_target"]))


def _relative(row: Row, baseline: Row | None) -> Cell:
    """The loss's difference from the fp32 baseline's, in percent; within 1 % is good."""
    ratio = _ratio(row, baseline, "final_loss")
    if ratio is None or row is baseline:
        return number("–")
    return number(f"{(ratio - 1) * 100:+.2f} %", "good" if ratio <= 1.01 else "bad")


def _ratio(row: Row, baseline: Row | None, key: str) -> float | None:
    if baseline is None or not baseline[key] or row[key] is None:
        return None
    return float(row[key]) / float(baseline[key])
