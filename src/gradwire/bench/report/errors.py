"""The report on `bench error`: what methods lose on recorded gradients, for how many bits."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gradwire.bench.report import svg
from gradwire.bench.report.kinds import Row
from gradwire.bench.report.lines import Axes, Line, lines
from gradwire.bench.report.parts import Cell, Figure, Question, Section, Table
from gradwire.bench.report.quantities import DASH, digits, plural, size
from gradwire.bench.report.rows import grouped, run_of

_STEP = "How far is a step's average from the exact mean, at how many bits?"
_SUM = "How much is lost over all steps together?"
_LAYERS = "Where is it lost?"
_COMMIT = "commit of the run"
_PALETTE = ("g0", "t1", "g1", "g3", "g2", "t3", "g4", "t2", "t0")

Group = tuple[tuple[str, str, bool], list[Row]]  # (method, algorithm, error feedback), its rows


def sections(rows: Sequence[Row]) -> list[Section]:
    """One section per recording and commit that measured it: methods measured by several commands
    stand together."""
    by_commit = [{**row, _COMMIT: run_of(row)[1]} for row in rows]
    found = grouped(by_commit, "task", "ranks", "steps", "recorded", _COMMIT)
    return [_section(mine, len(found) > 1) for mine in found.values()]


def _section(rows: Sequence[Row], several: bool) -> Section:
    totals = [row for row in rows if row["row"] == "total"]
    layers = [row for row in rows if row["row"] == "layer"]
    first = rows[0]
    at = sorted({row["at"] for row in rows})
    about = (
        f"{plural(first['steps'], 'consecutive step')} of {first['ranks']} ranks at "
        f"{plural(len(at), 'point')} of training (step {', '.join(map(str, at))}). NMSE: squared "
        "error, relative to the exact mean's square; 1 is the error of sending nothing. Figures "
        "are means over the points."
    )
    questions = []
    if totals:
        groups = list(grouped(totals, "method", "algorithm", "error_feedback").items())
        questions += _drawn(groups, "nmse", _STEP, [_table(groups)], _step_answers(groups))
        questions += _drawn(groups, "nmse_of_sum", _SUM, [], _sum_answers(groups))
    if layers:
        questions.append(Question(_LAYERS, table=_by_layer(layers)))
    command, commit, date = run_of(first, "recorded")
    told = f"Recorded by `{command}`, at {commit}, {date}; measured at {first[_COMMIT]}."
    title = f"Error on recorded gradients of {first['task']}"
    return Section(title, [about, told] if several else [about], questions)


def _mean(rows: Sequence[Row], key: str) -> float | None:
    """Over the points; None if one has none."""
    values = [row.get(key) for row in rows]
    known = [value for value in values if value is not None]
    return statistics.mean(known) if len(known) == len(values) else None


def _drawn(
    groups: Sequence[Group], key: str, title: str, tables: Sequence[Table], answers: list[str]
) -> list[Question]:
    """A figure per nine families of methods, a line for each, dashed with error feedback."""
    families = list(dict.fromkeys(_family(*name[:2]) for name, _ in groups))
    found = []
    for start in range(0, len(families), len(_PALETTE)):
        drawn = []
        for family, colour in zip(families[start:], _PALETTE, strict=False):
            for feedback in (False, True):
                mine = [
                    rows for name, rows in groups
                    if (_family(*name[:2]), name[2]) == (family, feedback)
                ]  # fmt: skip
                points = sorted(
                    (_mean(rows, "packed_bits"), _mean(rows, key))
                    for rows in mine
                    if _mean(rows, "packed_bits") and _mean(rows, key) is not None
                )
                if points:
                    label = f"{family}, error feedback" if feedback else family
                    stroke = svg.Stroke(f"var(--{colour})", "6 3" if feedback else "")
                    xs, ys = [x or 0.0 for x, _ in points], [y for _, y in points]
                    drawn.append(Line(label, stroke, xs, ys))
        if not drawn:
            continue
        axes = Axes(
            "bits per value, packed", "NMSE", title, rule=(1.0, "sends nothing"), log_x=True,
            log_y=True,
        )  # fmt: skip
        caption = (
            "A line joins the options of one method. Bits are those that a rank feeds into "
            "collectives, without headers; dashed: with error feedback."
        )
        figure, last = Figure(caption, lines(drawn, axes)), start == 0
        table = tables[0] if tables and last else None
        found.append(Question(title, answers if last else [], figure, table))
    return found or [Question(title, answers, table=tables[0] if tables else None)]


def _family(method: str, algorithm: str) -> str:
    return f"{method.partition(':')[0]}, {algorithm}"


def _step_answers(groups: Sequence[Group]) -> list[str]:
    worst = [
        f"{method}{_with(feedback)} ({digits(error)})"
        for (method, _, feedback), rows in groups
        if (error := _mean(rows, "nmse")) is not None and error >= 1
    ]
    answers = []
    if worst:
        answers.append(f"In a single step farther from the mean than zero is: {', '.join(worst)}.")
    if any(feedback for (_, _, feedback), _ in groups):
        answers.append(
            "With error feedback a step's average also brings what earlier steps left, so it is "
            "farther from that step's mean; what is lost for good stands under the next question."
        )
    return answers


def _sum_answers(groups: Sequence[Group]) -> list[str]:
    """What error feedback does, for methods measured with and without."""
    known = {name: _mean(rows, "nmse_of_sum") for name, rows in groups}
    answers = []
    for (method, algorithm, feedback), without in known.items():
        fed = known.get((method, algorithm, True))
        if feedback or without is None or fed is None:
            continue
        change = "less" if fed < without else "not less"
        answers.append(
            f"{method} by {algorithm} loses {digits(without)} of the sum, with error feedback "
            f"{digits(fed)}: {change}."
        )
    return answers


def _with(feedback: object) -> str:
    return " with error feedback" if feedback else ""


def _table(groups: Sequence[Group]) -> Table:
    rows = []
    for (method, algorithm, feedback), mine in groups:
        single = [row["nmse"] for row in mine if row["nmse"] is not None]
        among = f"{digits(min(single))} to {digits(max(single))}" if len(single) > 1 else DASH
        keys = ("nmse", "nmse_of_fed", "nmse_of_sum", "cosine", "packed_bits", "input_bits")
        figures = {key: Cell(digits(_mean(mine, key)), True) for key in keys}
        rows.append([
            Cell(method), Cell(algorithm), Cell("yes" if feedback else "no"), figures.pop("nmse"),
            Cell(among, True), *figures.values(), Cell(size(_mean(mine, "wire_bytes")), True),
        ])  # fmt: skip
    headings = ["method", "algorithm", "error feedback", "NMSE", "over points"]
    headings += ["NMSE of what was fed in", "NMSE of the sum", "cosine"]
    headings += ["bits, packed", "bits, 32-bit positions", "sent per rank and step"]
    return Table(headings, rows)


def _by_layer(layers: Sequence[Row]) -> Table:
    rows = []
    for (method, feedback, layer), mine in grouped(
        layers, "method", "error_feedback", "layer"
    ).items():
        keys = ("nmse", "nmse_of_sum", "cosine", "packed_bits")
        rows.append([
            Cell(method), Cell("yes" if feedback else "no"), Cell(layer),
            Cell(f"{mine[0]['numel']:,}", True),
            *(Cell(digits(_mean(mine, key)), True) for key in keys),
        ])  # fmt: skip
    headings = ["method", "error feedback", "layer", "values", "NMSE", "NMSE of the sum"]
    return Table([*headings, "cosine", "bits, packed"], rows)
