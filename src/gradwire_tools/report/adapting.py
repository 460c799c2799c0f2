"""The report on `bench adapt`: what a method per layer saves at equal error (THESIS 4.7)."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire_tools.bench.quantities import DASH, digits
from gradwire_tools.report import svg
from gradwire_tools.report.bars import dots
from gradwire_tools.report.kinds import Row
from gradwire_tools.report.lines import Axes, Line, lines
from gradwire_tools.report.parts import Figure, Question, Section, Table, table
from gradwire_tools.report.rows import grouped

_GAIN = "How many times fewer bytes than the uniform plan, at equal error?"
_RATIO = "What compression costs what error?"
_LAYERS = "How many bits does each layer get?"
_COLUMNS = (
    "family | reference | policy | ratio | of the uniform plan's = of_uniform | "
    "error, of the budget = share | global L2 error = global_error | solved in = solve_seconds"
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
    """A figure per point: a row of dots per reference."""
    found: list[Question] = []
    for there in grouped(rows, "at", "sigma").values():
        drawn, best, shown = [], [], list[Row]()
        for (family, reference), mine in grouped(there, "family", "reference").items():
            for row in mine:
                share = row["error"] / row["budget"] if row["budget"] else None
                shown.append({**row, "share": share})
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
        where = _where(there[0])
        caption = f"{where}: policies that keep to the budget. Right of 1 a plan sends less."
        figure = Figure(caption, dots(drawn, "gain over uniform", _GAIN, rule=(1.0, "uniform")))
        answers = best or ["No policy sends less."]
        found.append(Question("" if found else _GAIN, answers, figure, table(shown, _COLUMNS)))
    return found


def _curves(rows: Sequence[Row]) -> list[Question]:
    """Where a family has several references: ratio against error, a line per policy."""
    found: list[Question] = []
    for (_, _, family), mine in grouped(rows, "at", "sigma", "family").items():
        if family == "mixed" or len({row["reference"] for row in mine}) < 2:
            continue
        strokes = svg.plain(row["policy"] for row in mine)
        drawn = []
        for policy, stroke in strokes.items():
            own = [row for row in mine if row["policy"] == policy and row["error"]]
            points = sorted((row["error"], row["ratio"]) for row in own)
            if points:
                xs, ys = zip(*points, strict=True)
                drawn.append(Line(policy, stroke, xs, ys))
        axes = Axes("error", "fp32 bytes over payload bytes", _RATIO, log_x=True, log_y=True)
        caption = (
            f"{_where(mine[0])}, {family}: a line joins a policy's plans around several "
            "references. Left and up is better."
        )
        figure = Figure(caption, lines(drawn, axes))
        found.append(Question("" if found else _RATIO, figure=figure))
    return found


def _bits(rows: Sequence[Row]) -> list[Question]:
    """Of the last point, a figure per reference: bits by the layer's place (THESIS, Fig. 4.3)."""
    found: list[Question] = []
    *_, last = grouped(rows, "at", "sigma").values()
    for (family, reference), mine in grouped(last, "family", "reference").items():
        plans = {row["policy"]: row["bits_by_layer"] for row in mine if row.get("bits_by_layer")}
        names = list(next(iter(plans.values()), ()))
        plans = {policy: bits for policy, bits in plans.items() if list(bits) == names}
        if set(plans) <= {"uniform"}:
            continue
        places = list(range(1, len(names) + 1))
        drawn = [
            Line(policy, stroke, places, [plans[policy][name] for name in names])
            for policy, stroke in svg.plain(plans).items()
        ]
        cells = [
            [str(place), name, *(digits(bits[name]) for bits in plans.values())]
            for place, name in zip(places, names, strict=True)
        ]
        caption = (
            f"{_where(mine[0])}, {family} around {reference}. Layers in the model's order; those "
            "without a choice, as vectors are, are left out."
        )
        figure = Figure(caption, lines(drawn, Axes("layer", "payload bits per value", _LAYERS)))
        shown = Table(["", "layer", *plans], cells)
        found.append(Question("" if found else _LAYERS, (), figure, shown))
    return found
