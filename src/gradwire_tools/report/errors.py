"""The report on errors of methods: `bench error` on recorded gradients, `bench adapt` per layer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from gradwire_tools.bench.quantities import DASH, digits, plural, reach
from gradwire_tools.report.parts import (
    PALETTE,
    Dots,
    Lines,
    Question,
    Section,
    Table,
    series,
    table,
)
from gradwire_tools.report.rows import Row, grouped, run_of

_STEP = "How far is a step's average from the exact mean, at how many bits?"
_SUM = "How much is lost over all steps together?"
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
        questions.append(Question("Where is it lost?", table=_by_layer(layers)))
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


def _means(rows: Sequence[Row], *keys: str) -> Row:
    """One row, with means over the points."""
    return {**rows[0], **{key: _mean(rows, key) for key in keys}}


def _questions(
    groups: Sequence[Group], key: str, title: str, answers: list[str], told: Table | None = None
) -> list[Question]:
    """A chart per nine families of methods, a line for each, dashed with error feedback; answers
    and the table stand beside the first."""
    points: dict[str, list[tuple[str, str, float, float]]] = {}
    for (method, algorithm, feedback), rows in groups:
        bits, error = _mean(rows, "packed_bits"), _mean(rows, key)
        if bits and error is not None:
            family, note = f"{method.partition(':')[0]}, {algorithm}", "error feedback" * feedback
            points.setdefault(family, []).append((family, note, bits, error))
    families = list(points)
    caption = (
        "A line joins the options of one method. Bits are those that a rank feeds into "
        "collectives, without headers; dashed: with error feedback."
    )
    found = []
    for at in range(0, len(families), len(PALETTE)):
        drawn = series(
            point for family in families[at : at + len(PALETTE)] for point in points[family]
        )
        chart = Lines(drawn, "bits per value, packed", "NMSE", (1.0, "sends nothing"), True, True)
        found.append(Question(title, (), chart, caption))
    first = found[0] if found else Question(title)
    return [replace(first, answers=answers, table=told), *found[1:]]


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
        {**_means(mine, *keys, "wire_bytes"), "over points": reach(_known(mine, "nmse"), digits)}
        for _, mine in groups
    ]
    return table(
        rows,
        "method | algorithm | error feedback = error_feedback | NMSE = nmse | over points | "
        "NMSE of what was fed in = nmse_of_fed | NMSE of the sum = nmse_of_sum | cosine | "
        "bits, packed = packed_bits | bits, 32-bit positions = input_bits | "
        "sent per rank and step = wire_bytes",
    )


def _by_layer(layers: Sequence[Row]) -> Table | None:
    found = grouped(layers, "method", "error_feedback", "layer")
    keys = ("nmse", "nmse_of_sum", "cosine", "packed_bits")
    return table(
        [_means(mine, *keys) for mine in found.values()],
        "method | error feedback = error_feedback | layer | values = numel | NMSE = nmse | "
        "NMSE of the sum = nmse_of_sum | cosine | bits, packed = packed_bits",
    )


_METRICS = {"l2": "sum of L2 norms", "squared": "sum of squared L2 norms"}


def policies(rows: Sequence[Row]) -> Section:
    """Of one task, metric and run."""
    first = rows[0]
    metric = _METRICS.get(first["error_metric"], first["error_metric"])
    known = [row for row in rows if None not in (row["ratio"], row["of_uniform"], row["error"])]
    told = sorted({f"{row['policy']}: {row['fallback']}." for row in rows if row["fallback"]})
    about = (
        f"{first['layers']} layers. A plan's error is the {metric} of what each layer's method "
        "loses of an averaged gradient, without error feedback; the budget is that of the uniform "
        "plan, which gives every layer the reference."
    )
    questions = [*_gains(known), *_curves(known), *_bits(known)] if known else []
    return Section(f"Policies on {first['task']}, by {metric}", [about, *told], questions)


def _where(row: Row) -> str:
    """The point of a recording, or the seeded table."""
    if row.get("at") is not None:
        return f"Step {row['at']}"
    return DASH if row.get("sigma") is None else f"Sigma {row['sigma']:g}"


def _gains(rows: Sequence[Row]) -> list[Question]:
    """A chart per point: a row of dots per reference."""
    found: list[Question] = []
    for there in grouped(rows, "at", "sigma").values():
        drawn, best = [], []
        families = grouped(there, "family", "reference")
        for (family, reference), mine in families.items():
            points = [
                (row["policy"], row["of_uniform"])
                for row in mine
                if row["budget"] is not None and row["of_uniform"]
            ]
            codec = reference.partition(":")[0]
            drawn.append((f"mixed, {codec}" if family == "mixed" else reference, points))
            name, most = max(points, key=lambda point: float(point[1]), default=("", 0.0))
            if most > 1:
                best.append(f"{family} around {reference}: {name}, {digits(most)} times.")
        shown = table(
            [row for mine in families.values() for row in mine],
            "family | reference | policy | ratio | of the uniform plan's = of_uniform | error, of "
            "the budget = share | global L2 error = global_error | solved in = solve_seconds",
            share=lambda row: row["error"] / row["budget"] if row["budget"] else None,
        )
        title = "" if found else "How many times fewer bytes than the uniform plan, at equal error?"
        where = _where(there[0])
        caption = f"{where}: policies that keep to the budget. Right of 1 a plan sends less."
        chart = Dots(drawn, "gain over uniform", (1.0, "uniform"))
        answers = best or ["No policy sends less."]
        found.append(Question(title, answers, chart, caption, shown))
    return found


def _curves(rows: Sequence[Row]) -> list[Question]:
    """Where a family has several references: ratio against error, a line per policy."""
    found: list[Question] = []
    for (_, _, family), mine in grouped(rows, "at", "sigma", "family").items():
        if family == "mixed" or len({row["reference"] for row in mine}) < 2:
            continue
        drawn = series(
            (row["policy"], "", row["error"], row["ratio"]) for row in mine if row["error"]
        )
        title = "" if found else "What compression costs what error?"
        chart = Lines(drawn, "error", "fp32 bytes over payload bytes", log_x=True, log_y=True)
        caption = (
            f"{_where(mine[0])}, {family}: a line joins a policy's plans around several "
            "references. Left and up is better."
        )
        found.append(Question(title, (), chart, caption))
    return found


def _bits(rows: Sequence[Row]) -> list[Question]:
    """Of the last point, a chart per reference: bits by the layer's place (THESIS, Fig. 4.3)."""
    found: list[Question] = []
    *_, last = grouped(rows, "at", "sigma").values()
    for (family, reference), mine in grouped(last, "family", "reference").items():
        plans = {row["policy"]: row["bits_by_layer"] for row in mine if row.get("bits_by_layer")}
        names = list(next(iter(plans.values()), ()))
        plans = {policy: bits for policy, bits in plans.items() if list(bits) == names}
        if set(plans) <= {"uniform"}:
            continue
        places = list(enumerate(names, start=1))
        drawn = series(
            (policy, "", place, bits[name])
            for policy, bits in plans.items()
            for place, name in places
        )
        cells = [
            [str(place), name, *(digits(bits[name]) for bits in plans.values())]
            for place, name in places
        ]
        title = "" if found else "How many bits does each layer get?"
        caption = (
            f"{_where(mine[0])}, {family} around {reference}. Layers in the model's order; those "
            "without a choice, as vectors are, are left out."
        )
        chart = Lines(drawn, "layer", "payload bits per value")
        found.append(Question(title, (), chart, caption, Table(["", "layer", *plans], cells)))
    return found
