"""The report on `bench error`: what methods lose on recorded gradients, for how many bits."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gradwire_tools.bench.quantities import digits, plural, reach
from gradwire_tools.report import svg
from gradwire_tools.report.kinds import Row
from gradwire_tools.report.lines import Axes, Line, lines
from gradwire_tools.report.parts import Figure, Question, Section, Table, table
from gradwire_tools.report.rows import grouped, run_of

_STEP = "How far is a step's average from the exact mean, at how many bits?"
_SUM = "How much is lost over all steps together?"
_LAYERS = "Where is it lost?"
_COMMIT = "commit of the run"

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
        questions += _questions(groups, "nmse", _STEP, _step_answers(groups), _table(groups))
        questions += _questions(groups, "nmse_of_sum", _SUM, _sum_answers(groups))
    if layers:
        questions.append(Question(_LAYERS, table=_by_layer(layers)))
    command, commit, date = run_of(first, "recorded")
    told = f"Recorded by `{command}`, at {commit}, {date}; measured at {first[_COMMIT]}."
    title = f"Error on recorded gradients of {first['task']}"
    return Section(title, [about, told] if several else [about], questions)


def _known(rows: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def _mean(rows: Sequence[Row], key: str) -> float | None:
    """Over the points; None if one has none."""
    known = _known(rows, key)
    return statistics.mean(known) if len(known) == len(rows) else None


def _questions(
    groups: Sequence[Group], key: str, title: str, answers: list[str], told: Table | None = None
) -> list[Question]:
    """Answers and the table stand beside the first figure."""
    figures = _figures(groups, key, title)
    first = Question(title, answers, figures[0] if figures else None, told)
    return [first, *(Question(title, (), one) for one in figures[1:])]


def _figures(groups: Sequence[Group], key: str, title: str) -> list[Figure]:
    """A figure per nine families of methods, a line for each, dashed with error feedback."""
    points: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for (method, algorithm, feedback), rows in groups:
        bits, error = _mean(rows, "packed_bits"), _mean(rows, key)
        if bits and error is not None:
            family = f"{method.partition(':')[0]}, {algorithm}"
            points.setdefault((family, feedback), []).append((bits, error))
    strokes = svg.plain(family for family, _ in points)
    families, found = list(strokes), []
    caption = (
        "A line joins the options of one method. Bits are those that a rank feeds into "
        "collectives, without headers; dashed: with error feedback."
    )
    axes = Axes(
        "bits per value, packed", "NMSE", title, rule=(1.0, "sends nothing"), log_x=True,
        log_y=True,
    )  # fmt: skip
    for start in range(0, len(families), len(svg.PALETTE)):
        drawn = []
        for family in families[start : start + len(svg.PALETTE)]:
            for feedback in (False, True):
                if (family, feedback) in points:
                    label = f"{family}, error feedback" if feedback else family
                    stroke = strokes[family].dashed if feedback else strokes[family]
                    xs, ys = zip(*sorted(points[family, feedback]), strict=True)
                    drawn.append(Line(label, stroke, xs, ys))
        found.append(Figure(caption, lines(drawn, axes)))
    return found


def _step_answers(groups: Sequence[Group]) -> list[str]:
    worst = [
        f"{method}{' with error feedback' if feedback else ''} ({digits(error)})"
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


def _table(groups: Sequence[Group]) -> Table | None:
    keys = ("nmse", "nmse_of_fed", "nmse_of_sum", "cosine", "packed_bits", "input_bits")
    rows = [
        {
            **mine[0],
            **{key: _mean(mine, key) for key in (*keys, "wire_bytes")},
            "over points": reach(_known(mine, "nmse"), digits),
        }
        for _, mine in groups
    ]
    columns = (
        "method | algorithm | error feedback = error_feedback | NMSE = nmse | over points | "
        "NMSE of what was fed in = nmse_of_fed | NMSE of the sum = nmse_of_sum | cosine | "
        "bits, packed = packed_bits | bits, 32-bit positions = input_bits | "
        "sent per rank and step = wire_bytes"
    )
    return table(rows, columns)


def _by_layer(layers: Sequence[Row]) -> Table | None:
    """Means over the points."""
    found = grouped(layers, "method", "error_feedback", "layer")
    keys = ("nmse", "nmse_of_sum", "cosine", "packed_bits")
    rows = [{**mine[0], **{key: _mean(mine, key) for key in keys}} for mine in found.values()]
    columns = (
        "method | error feedback = error_feedback | layer | values = numel | NMSE = nmse | "
        "NMSE of the sum = nmse_of_sum | cosine | bits, packed = packed_bits"
    )
    return table(rows, columns)
