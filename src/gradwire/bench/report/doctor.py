"""The report on `gradwire doctor`: whether compression pays, the measured step, what is there."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.bench.interleaved import quartiles
from gradwire.bench.report import svg
from gradwire.bench.report.bars import Bar, bars
from gradwire.bench.report.kinds import Row
from gradwire.bench.report.parts import Cell, Figure, Question, Section, Table
from gradwire.bench.report.quantities import network, plural, seconds, time_unit

_PAYS = "Does compression pay here?"
_VERDICT = "verdict"


def sections(rows: Sequence[Row]) -> list[Section]:
    """One section per examination."""
    return [_section(mine) for mine in _examinations(rows)]


def _examinations(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows in their order; a part that has been there begins the next examination."""
    found: list[list[Row]] = []
    seen: set[str] = set()
    for row in rows:
        if not found or _VERDICT in seen or row["part"] in seen:
            found.append([])
            seen = set()
        found[-1].append(row)
        seen.add(row["part"])
    return found


def _section(rows: Sequence[Row]) -> Section:
    steps = [row for row in rows if "step_seconds" in row]
    told = [row["detail"] for row in rows if row["part"] == _VERDICT]
    parts = [row for row in rows if "step_seconds" not in row and row["part"] != _VERDICT]
    questions = []
    if steps:
        questions.append(_steps(steps, told))
    elif told:
        questions.append(Question(_PAYS, told))
    if parts:
        table = [
            [Cell(row["part"]), Cell("yes" if row["available"] else "no"), Cell(row["detail"])]
            for row in parts
        ]
        questions.append(Question("What is there?", table=Table(["part", "there", ""], table)))
    return Section("Examination of this machine and network", (), questions)


def _steps(rows: Sequence[Row], told: Sequence[str]) -> Question:
    strokes = svg.strokes(row["method"] for row in rows)
    unit, scale = time_unit(row["step_seconds"] for row in rows)
    drawn, table = [], []
    for row in rows:
        whole, exposed = row["step_seconds"], min(row["exposed_seconds"], row["step_seconds"])
        low, high = quartiles(row["turn_seconds"])
        drawn.append(
            Bar(
                row["method"],
                strokes[row["method"]].colour,
                [(whole - exposed) / scale, exposed / scale],
                seconds(whole),
                (low / scale, high / scale),
            )
        )
        times = ("step_seconds", "compute_seconds", "exposed_seconds", "communication_seconds")
        table.append(
            [
                Cell(row["method"]),
                *(Cell(seconds(row[key]), True) for key in times),
                Cell(f"{seconds(low)} to {seconds(high)}", True),
                Cell(str(len(row["turn_seconds"])), True),
            ]
        )
    first = rows[0]
    caption = (
        f"A step of {first['numel']:,} values on {first['ranks']} ranks, {_where(first['net'])}. "
        "The median turn of the slowest rank; the spread is that of the middle half of "
        f"{plural(len(first['turn_seconds']), 'turn')}."
    )
    figure = Figure(
        caption, bars(drawn, f"{unit} per step", _PAYS, ("computing", "exposed communication"))
    )
    headings = ["method", "step", "computing", "exposed", "alone", "middle half", "turns"]
    return Question(_PAYS, told, figure, Table(headings, table))


def _where(net: str) -> str:
    return "the network between torchrun's ranks" if net == "as it is" else network(net)
