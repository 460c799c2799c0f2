"""The report on `gradwire sim --sharded`: predicted steps under FSDP2 by method."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.bench.report import svg
from gradwire.bench.report.bars import Bar, bars
from gradwire.bench.report.kinds import Row
from gradwire.bench.report.parts import Cell, Figure, Question, Section, Table
from gradwire.bench.report.quantities import DASH, digits, network, seconds, size, time_unit
from gradwire.bench.report.rows import grouped

_TITLE = "How long does a step take under FSDP2?"
_CAPTION = (
    "Predicted seconds of a step: forward and backward, then what they do not hide. The tick is "
    "the limit of the wire and of computing."
)


def sections(rows: Sequence[Row]) -> list[Section]:
    """One section per model and machine, with a question per network and number of ranks."""
    return [_section(mine) for mine in grouped(rows, "model", "machine").values()]


def _section(rows: Sequence[Row]) -> Section:
    first = rows[0]
    about = (
        "Predicted, not measured: FSDP2's order of gathers, computing and reduce-scatters on a "
        f"virtual clock, with kernels' times from {first.get('machine') or 'an unnamed machine'}. "
        "Torch's collectives are at their best."
    )
    places = grouped(rows, "net", "ranks", "per_node", "blocking", "forward_seconds", "sweep")
    questions = [_question(mine) for mine in places.values()]
    return Section(f"Simulation of {first['model']} under FSDP2", [about], questions)


def _question(rows: Sequence[Row]) -> Question:
    first = rows[0]
    unit, scale = time_unit(row["seconds"] for row in rows)
    strokes = svg.strokes(row["method"] for row in rows)
    drawn, table = [], []
    for row in rows:
        computing, limit = row["forward_seconds"] + row["backward_seconds"], row["limit_seconds"]
        name = f"{row['method']}, {row['algorithm']}"
        if row.get("sweep") not in (None, "rate", "latency", "ranks"):
            name += f", {row['sweep']}={row.get('value')}"
        drawn.append(
            Bar(
                name,
                strokes[row["method"]].colour,
                [computing / scale, max(row["seconds"] - computing, 0.0) / scale],
                seconds(row["seconds"]),
                limit=None if limit is None else limit / scale,
            )
        )
        ratio = row["ratio"]
        table.append([
            Cell(name), Cell(seconds(row["seconds"]), True), Cell(seconds(computing), True),
            Cell(seconds(limit), True), Cell(seconds(row["compute_seconds"]), True),
            Cell(size(row["weights_wire_bytes"]), True),
            Cell(size(row["gradients_wire_bytes"]), True),
            Cell(DASH if ratio is None else f"{digits(ratio)}×", True),
        ])  # fmt: skip
    waits = "; the host waits for collectives" if first["blocking"] else ""
    where = f"{first['ranks']} ranks, {first['per_node']} per node, {network(first['net'])}{waits}"
    title = f"{_TITLE} {where}"
    parts_of = ("computing", "exposed communication")
    headings = ["method", "predicted", "computing", "limit", "kernels", "weights", "gradients"]
    figure = Figure(_CAPTION, bars(drawn, f"{unit} per step", title, parts_of))
    return Question(title, (), figure, Table([*headings, "ratio"], table))
