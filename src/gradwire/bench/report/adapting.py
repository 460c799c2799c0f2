"""The report on `bench adapt`: what a method per layer saves at equal error (THESIS 4.7)."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.bench.report import svg
from gradwire.bench.report.bars import Dots, dots
from gradwire.bench.report.kinds import Row
from gradwire.bench.report.lines import Axes, Line, lines
from gradwire.bench.report.parts import Cell, Figure, Question, Section, Table
from gradwire.bench.report.quantities import DASH, digits, seconds
from gradwire.bench.report.rows import grouped

_GAIN = "How many times fewer bytes than the uniform plan, at equal error?"
_RATIO = "What compression costs what error?"
_LAYERS = "How many bits does each layer get?"
_PALETTE = ("g0", "t1", "g1", "g3", "g2", "t3", "g4", "t2", "t0")
_METRICS = {"l2": "sum of L2 norms", "squared": "sum of squared L2 norms"}


def sections(rows: Sequence[Row]) -> list[Section]:
    """One per task, metric and run."""
    return [_section(mine) for mine in grouped(rows, "task", "error_metric", "run").values()]


def _section(rows: Sequence[Row]) -> Section:
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
    for _, there in grouped(rows, "at", "sigma").items():
        where, drawn, best, table = _where(there[0]), list[Dots](), list[str](), list[list[Cell]]()
        for (family, reference), mine in grouped(there, "family", "reference").items():
            bounded = [row for row in mine if row["budget"] is not None]
            points = [(row["policy"], row["of_uniform"]) for row in bounded if row["of_uniform"]]
            codec = reference.partition(":")[0]
            drawn.append(Dots(f"mixed, {codec}" if family == "mixed" else reference, points))
            name, most = max(points, key=lambda point: point[1], default=("", 0.0))
            if most > 1:
                best.append(f"{family} around {reference}: {name}, {digits(most)} times.")
            for row in mine:
                share = row["error"] / row["budget"] if row["budget"] else None
                table.append([
                    Cell(family), Cell(reference), Cell(row["policy"]),
                    Cell(digits(row["ratio"]), True), Cell(digits(row["of_uniform"]), True),
                    Cell(digits(share), True), Cell(digits(row["global_error"]), True),
                    Cell(seconds(row["solve_seconds"]), True),
                ])  # fmt: skip
        headings = ["family", "reference", "policy", "ratio", "of the uniform plan's"]
        headings += ["error, of the budget", "global L2 error", "solved in"]
        caption = f"{where}: policies that keep to the budget. Right of 1 a plan sends less."
        figure = Figure(caption, dots(drawn, "gain over uniform", _GAIN, rule=(1.0, "uniform")))
        title = _GAIN if not found else ""
        answers = best or ["No policy sends less."]
        found.append(Question(title, answers, figure, Table(headings, table)))
    return found


def _curves(rows: Sequence[Row]) -> list[Question]:
    """Where a family has several references: ratio against error, a line per policy."""
    found: list[Question] = []
    for (_, _, family), mine in grouped(rows, "at", "sigma", "family").items():
        if family == "mixed" or len({row["reference"] for row in mine}) < 2:
            continue
        drawn = []
        for colour, ((policy,), own) in zip(
            _PALETTE, grouped(mine, "policy").items(), strict=False
        ):
            points = sorted((row["error"], row["ratio"]) for row in own if row["error"])
            if points:
                xs, ys = zip(*points, strict=True)
                drawn.append(Line(str(policy), svg.Stroke(f"var(--{colour})"), xs, ys))
        axes = Axes("error", "fp32 bytes over payload bytes", _RATIO, log_x=True, log_y=True)
        caption = (
            f"{_where(mine[0])}, {family}: a line joins a policy's plans around several "
            "references. Left and up is better."
        )
        figure = Figure(caption, lines(drawn, axes))
        found.append(Question(_RATIO if not found else "", figure=figure))
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
            Line(policy, svg.Stroke(f"var(--{colour})"), places, [bits[name] for name in names])
            for colour, (policy, bits) in zip(_PALETTE, plans.items(), strict=False)
        ]
        table = [
            [Cell(str(place)), Cell(name), *(Cell(digits(b[name]), True) for b in plans.values())]
            for place, name in zip(places, names, strict=True)
        ]
        caption = (
            f"{_where(mine[0])}, {family} around {reference}. Layers in the model's order; those "
            "without a choice, as vectors are, are left out."
        )
        figure = Figure(caption, lines(drawn, Axes("layer", "payload bits per value", _LAYERS)))
        title = _LAYERS if not found else ""
        found.append(Question(title, (), figure, Table(["", "layer", *plans], table)))
    return found
