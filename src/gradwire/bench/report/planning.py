"""The report on `bench planner` and `bench ablation`: whether the planner chooses well, and what
each part of the design brings."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.bench.report import svg
from gradwire.bench.report.bars import Bar, bars
from gradwire.bench.report.kinds import Row
from gradwire.bench.report.lines import Axes, Line, lines
from gradwire.bench.report.parts import Cell, Figure, Question, Section, Table
from gradwire.bench.report.quantities import (
    DASH,
    digits,
    network,
    percent,
    percent_of,
    plural,
    seconds,
    size,
)
from gradwire.bench.report.rows import grouped

NEAR, PARTITION, TRUE = (
    1.15,
    1.05,
    0.2,
)  # of the fastest; of the best partition; of what is measured
_CHOICE = "Does the planner choose the fastest, and is what it expects true?"
_PARTS = "What does each part bring?"
_COLOURS = {"lab": "var(--g0)", "simulator": "var(--t1)"}
_PALETTE = ("g0", "t1", "g1", "g3", "g2", "t3", "g4", "t2", "t0")


def choices(rows: Sequence[Row]) -> list[Section]:
    """One section per run: a line per network, dashed where it is what the planner expects."""
    return [_choices(mine) for mine in grouped(rows, "ranks", "run").values()]


def _choices(rows: Sequence[Row]) -> Section:
    near = sum(row["ratio"] <= NEAR for row in rows)
    true = sum(abs(row["error"]) <= TRUE for row in rows)
    parts = [row["partition_ratio"] for row in rows if row["partition_ratio"] is not None]
    right = sum(row["compress"] == row["best_compresses"] for row in rows)
    answers = [
        (
            f"Of {plural(len(rows), 'choice')}, {near} took at most {percent_of(NEAR - 1)} longer "
            f"than the fastest setting that was measured, the worst {digits(_most(rows, 'ratio'))} "
            "times as long."
        ),
        f"It compressed, or declined to, as the fastest did in {right} of {len(rows)}.",
        (
            f"Its partition was at most {percent_of(PARTITION - 1)} slower than another one in "
            f"{sum(part <= PARTITION for part in parts)} of {len(parts)}."
        ),
        (
            f"What it expected was within {percent_of(TRUE)} of what was measured in {true} of "
            f"{len(rows)}."
        ),
    ]
    drawn = []
    for colour, ((net,), mine) in zip(_PALETTE, grouped(rows, "net").items(), strict=False):
        ordered = sorted(mine, key=lambda row: int(row["nbytes"]))
        sizes = [row["nbytes"] for row in ordered]
        for key, dashes in (("seconds", ""), ("expected_seconds", "6 3")):
            label = str(net) if not dashes else f"{net}, expected"
            stroke = svg.Stroke(f"var(--{colour})", dashes)
            drawn.append(Line(label, stroke, sizes, [row[key] for row in ordered]))
    axes = Axes("bytes of the gradient", "seconds", _CHOICE, log_x=True, log_y=True)
    table = [
        [
            Cell(network(row["net"])), Cell(size(row["nbytes"]), True), Cell(_method(row)),
            Cell(seconds(row["seconds"]), True), Cell(seconds(row["expected_seconds"]), True),
            Cell(percent(1 + row["error"]), True), Cell(row["best_method"]),
            Cell(digits(row["ratio"]), True), Cell(digits(row["partition_ratio"]), True),
        ]
        for row in rows
    ]  # fmt: skip
    headings = ["network", "gradient", "choice", "took", "expected", "off by", "fastest"]
    headings += ["over the fastest", "over the best partition"]
    figure = Figure("Solid: measured; dashed: expected.", lines(drawn, axes))
    about = f"One matrix, {plural(rows[0]['ranks'], 'rank')}; medians, in the lab."
    question = Question(_CHOICE, answers, figure, Table(headings, table))
    return Section("The planner's choices", [about], [question])


def _most(rows: Sequence[Row], key: str) -> float:
    return max(float(row[key]) for row in rows)


def _method(row: Row) -> str:
    cut = DASH if row["segments"] is None else row["segments"]
    return f"{row['method']} by {row['algorithm']}, segments {cut}"


def ablations(rows: Sequence[Row]) -> list[Section]:
    """One section per model, network and run (HIPRESS, Fig. 12)."""
    return [_ablation(mine) for mine in grouped(rows, "model", "numel", "net", "run").values()]


def _ablation(rows: Sequence[Row]) -> Section:
    first = rows[0]
    answers = []
    for row in rows:
        if row["cut"] is not None:
            less = "less" if row["cut"] >= 0 else "more"
            answers.append(
                f"{row['where']}, {row['part']}: {percent_of(abs(row['cut']))} {less} than before."
            )
    drawn = [
        Bar(
            f"{row['part']}, {row['where']}", _COLOURS.get(row["where"], "var(--g1)"),
            [row["synchronisation_seconds"]], seconds(row["synchronisation_seconds"]),
        )
        for row in rows
    ]  # fmt: skip
    table = [
        [
            Cell(row["where"]), Cell(row["part"]), Cell(row["method"]),
            Cell(seconds(row["synchronisation_seconds"]), True),
            Cell(percent_of(row["cut"]), True), Cell(seconds(row["step_seconds"]), True),
        ]
        for row in rows
    ]  # fmt: skip
    headings = ["where", "part", "method", "synchronisation", "less than before", "step"]
    caption = "Synchronisation per step: averaging, less what backward hides. Each part is added "
    caption += "to those above it."
    question = Question(
        _PARTS, answers, Figure(caption, bars(drawn, "seconds", _PARTS)), Table(headings, table)
    )
    about = f"{first['ranks']} ranks, {network(first['net'])}, {first['numel']:,} values."
    return Section(f"Ablation of {first.get('model', 'a model')}", [about], [question])
