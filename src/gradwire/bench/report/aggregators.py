"""The report on `bench aggregators`: CPU time and memory of averaging a model's gradients."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.bench.report import svg
from gradwire.bench.report.bars import Bar, bars
from gradwire.bench.report.kinds import Row
from gradwire.bench.report.parts import Cell, Figure, Question, Section, Table
from gradwire.bench.report.quantities import digits, percent_of, seconds, size
from gradwire.bench.report.rows import grouped

_TITLE = "What does a method cost in CPU time?"


def sections(rows: Sequence[Row]) -> list[Section]:
    """One section per task, number of ranks and size."""
    return [_section(mine) for mine in grouped(rows, "task", "ranks", "numel").values()]


def _section(rows: Sequence[Row]) -> Section:
    first = rows[0]
    strokes = svg.strokes(row["method"] for row in rows)
    drawn, table = [], []
    for row in rows:
        cost, share = row["ms_per_million"], row["orthogonal_share"]
        whole = max(0.0, cost)
        parts = [whole * (1 - min(1.0, share or 0.0)), whole * min(1.0, share or 0.0)]
        limit = row["limit_seconds"] * 1e9 / row["numel"]
        colour = strokes[row["method"]].colour
        drawn.append(Bar(row["method"], colour, parts, f"{digits(cost)} ms", limit=limit))
        table.append([
            Cell(row["method"]), Cell(f"{digits(cost)} ms", True),
            Cell(seconds(row["seconds"]), True), Cell(percent_of(row["of_limit"]), True),
            Cell(percent_of(share), True), Cell(str(row["rounds"]), True),
            Cell(size(row["wire_bytes"]), True), Cell(size(row["state_bytes"]), True),
            Cell(size(row["peak_extra_bytes"]), True), Cell(seconds(row["wall_seconds"]), True),
        ])  # fmt: skip
    caption = (
        "CPU time of the process per backward and million values, beyond that of a hook that does "
        "nothing: median over turns, mean over ranks. The limit is a copy of the gradients in the "
        "same turns."
    )
    answers = _beside_torch(rows)
    answers.append("These rows have no spread, so differences are given, and not judged.")
    names = ("other work", "orthogonalisation")
    figure = Figure(caption, bars(drawn, "ms per million values", _TITLE, names))
    headings = ["method", "CPU per million values", "CPU per backward", "limit / time"]
    headings += ["orthogonalisation", "rounds", "sent per rank", "state", "memory", "on the clock"]
    question = Question(_TITLE, answers, figure, Table(headings, table))
    about = f"Gradients of {first['task']}, {first['numel']:,} values; {first['ranks']} ranks."
    return Section(f"Cost of averaging the gradients of {first['task']}", [about], [question])


def _beside_torch(rows: Sequence[Row]) -> list[str]:
    """PowerSGD's methods against torch's hook of the same rank."""
    by_method = {row["method"]: row for row in rows}
    answers = []
    for row in rows:
        name, *options = row["method"].split(":")
        rank = next((one for one in options if one.startswith("rank=")), None)
        torch = by_method.get(f"torch-powersgd:{rank}")
        if name != "powersgd" or torch is None or torch["seconds"] <= 0:
            continue
        ratio = row["seconds"] / torch["seconds"]
        answers.append(f"{row['method']} takes {digits(ratio)} of the CPU time of torch's hook.")
    return answers
