"""The report on the planner: `bench planner`, `bench ablation`, and decisions during training."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire_tools.bench.quantities import DASH, digits, network, percent, percent_of, plural
from gradwire_tools.report import svg
from gradwire_tools.report.bars import Bar, bars
from gradwire_tools.report.kinds import Row
from gradwire_tools.report.lines import Axes, Line, lines
from gradwire_tools.report.parts import Figure, Question, Section, table
from gradwire_tools.report.rows import grouped

NEAR = 1.15  # times the fastest setting's seconds
PARTITION = 1.05  # times those of the best partition
TRUE = 0.2  # off what is measured
_CHOICE = "Does the planner choose the fastest, and is what it expects true?"
_PARTS = "What does each part bring?"
_COLOURS = {"lab": "var(--g0)", "simulator": "var(--t1)"}


def choices(rows: Sequence[Row]) -> Section:
    """Of one run: a line per network, dashed where it is what the planner expects."""
    near = sum(row["ratio"] <= NEAR for row in rows)
    true = sum(abs(row["error"]) <= TRUE for row in rows)
    parts = [row["partition_ratio"] for row in rows if row["partition_ratio"] is not None]
    right = sum(row["compress"] == row["best_compresses"] for row in rows)
    worst = digits(max(float(row["ratio"]) for row in rows))
    answers = [
        (
            f"Of {plural(len(rows), 'choice')}, {near} took at most {percent_of(NEAR - 1)} longer "
            f"than the fastest setting that was measured, the worst {worst} times as long."
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
    strokes = svg.plain(row["net"] for row in rows)
    drawn = []
    for (net,), mine in grouped(rows, "net").items():
        ordered = sorted(mine, key=lambda row: int(row["nbytes"]))
        sizes, took, expected = (
            [row[key] for row in ordered] for key in ("nbytes", "seconds", "expected_seconds")
        )
        drawn.append(Line(net, strokes[net], sizes, took))
        drawn.append(Line(f"{net}, expected", strokes[net].dashed, sizes, expected))
    axes = Axes("bytes of the gradient", "seconds", _CHOICE, log_x=True, log_y=True)
    columns = (
        "network = net | gradient = nbytes | choice | took = seconds | "
        "expected = expected_seconds | off by | fastest = best_method | "
        "over the fastest = ratio | over the best partition = partition_ratio"
    )
    shown = [{**row, "choice": _choice(row), "off by": percent(1 + row["error"])} for row in rows]
    figure = Figure("Solid: measured; dashed: expected.", lines(drawn, axes))
    about = f"One matrix, {plural(rows[0]['ranks'], 'rank')}; medians, in the lab."
    question = Question(_CHOICE, answers, figure, table(shown, columns))
    return Section("The planner's choices", [about], [question])


def _choice(row: Row) -> str:
    cut = DASH if row["segments"] is None else row["segments"]
    return f"{row['method']} by {row['algorithm']}, segments {cut}"


def ablation(rows: Sequence[Row]) -> Section:
    """Of one model, network and run (HIPRESS, Fig. 12)."""
    first = rows[0]
    answers = [
        f"{row['where']}, {row['part']}: {percent_of(abs(row['cut']))} "
        f"{'less' if row['cut'] >= 0 else 'more'} than before."
        for row in rows
        if row["cut"] is not None
    ]
    drawn = [
        Bar(
            f"{row['part']}, {row['where']}",
            [row["synchronisation_seconds"]],
            colour=_COLOURS.get(row["where"], "var(--g1)"),
        )
        for row in rows
    ]
    columns = "where | part | method | synchronisation = synchronisation_seconds | "
    columns += "less than before = cut | step = step_seconds"
    caption = (
        "Synchronisation per step: averaging, less what backward hides. Each part is added to "
        "those above it."
    )
    figure = Figure(caption, bars(drawn, "per step", _PARTS))
    about = f"{first['ranks']} ranks, {network(first['net'])}, {first['numel']:,} values."
    question = Question(_PARTS, answers, figure, table(rows, columns))
    return Section(f"Ablation of {first.get('model', 'a model')}", [about], [question])


def decisions(rows: Sequence[Row]) -> Section:
    """What policies and automatic mode have decided while they trained on one network."""
    first = rows[0]
    questions = [
        Question(
            f"What has {method} decided, seed {seed}?", table=table(mine, "step | decision = line")
        )
        for (method, seed), mine in grouped(rows, "method", "seed").items()
    ]
    about = f"{first['task']}, {first['ranks']} ranks, {network(first['net'])}."
    return Section("Decisions during training", [about], questions)
