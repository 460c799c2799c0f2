"""The report on `bench train --compose --validate`: composed times against those of whole runs."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.bench.report import origin
from gradwire.bench.report.kinds import Row
from gradwire.bench.report.parts import Cell, Question, Section, Table
from gradwire.bench.report.quantities import DASH, digits, network, percent, seconds
from gradwire.bench.report.rows import grouped

_TITLE = "Are composed times those of whole runs?"
_LARGE = 0.1


def sections(rows: Sequence[Row]) -> list[Section]:
    """One section per run, task and number of ranks."""
    found = grouped(rows, "task", "ranks", "parameters", "task_options", "run")
    return [_section(mine, rows) for mine in found.values()]


def _section(rows: Sequence[Row], among: Sequence[Row]) -> Section:
    table = [
        [
            Cell(row["method"]), Cell(network(row["net"])), Cell(str(row["steps"]), True),
            Cell(seconds(row["composed_seconds"]), True), Cell(seconds(row["whole_seconds"]), True),
            Cell(_percent(row["error"]), True),
            Cell(seconds(row.get("composed_time_to_target")), True),
            Cell(seconds(row.get("whole_time_to_target")), True),
            Cell(digits(row.get("composed_final_loss"), 4), True),
            Cell(digits(row.get("whole_final_loss"), 4), True),
        ]
        for row in rows
    ]  # fmt: skip
    errors = [(row["error"], row) for row in rows if row["error"] is not None]
    answers = ["No row has both times."]
    if errors:
        least, most = (pick(error for error, _ in errors) for pick in (min, max))
        between = f"{_percent(least)} to {_percent(most)}"
        answers = [f"Composed training times differ from those of whole runs by {between}."]
    answers += [
        f"{row['method']} on {network(row['net'])} is off by {_percent(error)}, more than 10 %."
        for error, row in errors
        if abs(error) > _LARGE
    ]
    headings = ["method", "network", "steps", "composed", "whole run", "error"]
    headings += ["to target, composed", "to target, whole", "last loss, composed", "whole"]
    first = rows[0]
    about = (
        "A composed time lacks the start of a run: connections, and compilation of kernels. "
        "Each pair is one run of each, so errors include the noise of both."
    )
    title = f"Composed runs of {first['task']}, {first['ranks']} ranks, against whole runs"
    told = origin.told(rows, among)
    return Section(title, [about, *told], [Question(_TITLE, answers, table=Table(headings, table))])


def _percent(error: float | None) -> str:
    return DASH if error is None else percent(1 + error)
