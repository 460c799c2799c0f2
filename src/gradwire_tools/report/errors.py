"""The report on errors: of methods on recorded gradients (`bench error`), and of plans per layer
(`bench adapt`, THESIS 4.7)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gradwire_tools.bench.quantities import DASH, digits, plural, reach
from gradwire_tools.report.parts import PALETTE, Dots, Question, Section, Table, lines, table
from gradwire_tools.report.rows import Row, grouped, run_of

_COMMIT = "commit of the run"
_MEANS = (
    *("nmse", "nmse_of_fed", "nmse_of_sum", "cosine"),
    *("packed_bits", "input_bits", "wire_bytes"),
)


def sections(rows: Sequence[Row]) -> list[Section]:
    """One section per recording and commit that measured it: methods measured by several commands
    stand together."""
    by_commit = [{**row, _COMMIT: run_of(row)[1]} for row in rows]
    found = grouped(by_commit, "task", "ranks", "steps", "recorded", _COMMIT)
    return [_section(mine, len(found) > 1) for mine in found.values()]


def _section(rows: Sequence[Row], several: bool) -> Section:
    totals = _means([row for row in rows if row["row"] == "total"], "algorithm")
    layers = _means([row for row in rows if row["row"] == "layer"], "layer")
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
        shown = table(
            totals,
            "method | algorithm | error feedback = error_feedback | NMSE = nmse | over points | "
            "NMSE of what was fed in = nmse_of_fed | NMSE of the sum = nmse_of_sum | cosine | "
            "bits, packed = packed_bits | bits, 32-bit positions = input_bits | "
            "sent per rank and step = wire_bytes",
        )
        title = "How far is a step's average from the exact mean, at how many bits?"
        questions += _questions(totals, "nmse", title, _step_answers(totals), shown)
        title = "How much is lost over all steps together?"
        questions += _questions(totals, "nmse_of_sum", title, _sum_answers(totals))
    if layers:
        shown = table(
            layers,
            "method | error feedback = error_feedback | layer | values = numel | NMSE = nmse | "
            "NMSE of the sum = nmse_of_sum | cosine | bits, packed = packed_bits",
        )
        questions.append(Question("Where is it lost?", table=shown))
    command, commit, date = run_of(first, "recorded")
    told = f"Recorded by `{command}`, at {commit}, {date}; measured at {first[_COMMIT]}."
    title = f"Error on recorded gradients of {first['task']}"
    return Section(title, [about, told] if several else [about], questions)


def _means(rows: Sequence[Row], key: str) -> list[Row]:
    """A row per method, error feedback and value of `key`, with means over the points; None where a
    point has none."""
    found = []
    for mine in grouped(rows, "method", "error_feedback", key).values():
        means: Row = {}
        for name in _MEANS:
            values: list[Any] = [row.get(name) for row in mine]
            means[name] = None if None in values else statistics.mean(values)
        errors = [row["nmse"] for row in mine if row["nmse"] is not None]
        found.append({**mine[0], **means, "over points": reach(errors, digits)})
    return found


def _questions(
    rows: Sequence[Row], key: str, title: str, answers: list[str], told: Table | None = None
) -> list[Question]:
    """A chart per nine families of methods, a line for each, dashed with error feedback; answers
    and the table stand beside the first."""
    families: dict[str, list[tuple[str, str, float, float]]] = {}
    for row in rows:
        family = f"{row['method'].partition(':')[0]}, {row['algorithm']}"
        if row["packed_bits"] and row[key] is not None:
            note = "error feedback" if row["error_feedback"] else ""
            families.setdefault(family, []).append((family, note, row["packed_bits"], row[key]))
    caption = (
        "A line joins the options of one method. Bits are those that a rank feeds into "
        "collectives, without headers; dashed: with error feedback."
    )
    axes, rule = ("bits per value, packed", "NMSE"), (1.0, "sends nothing")
    found, points = [], list(families.values())
    for at in range(0, len(points), len(PALETTE)):
        some = itertools.chain(*points[at : at + len(PALETTE)])
        chart = lines(some, *axes, rule=rule, log_x=True, log_y=True)
        found.append(Question(title, (), chart, caption))
    first = found[0] if found else Question(title)
    return [replace(first, answers=answers, table=told), *found[1:]]


def _step_answers(rows: Sequence[Row]) -> list[str]:
    worst = [
        f"{row['method']}{' with error feedback' * row['error_feedback']} ({digits(row['nmse'])})"
        for row in rows
        if row["nmse"] is not None and row["nmse"] >= 1
    ]
    answers = []
    if worst:
        answers.append(f"In a single step farther from the mean than zero is: {', '.join(worst)}.")
    if any(row["error_feedback"] for row in rows):
        answers.append(
            "With error feedback a step's average also brings what earlier steps left, so it is "
            "farther from that step's mean; what is lost for good stands under the next question."
        )
    return answers


def _sum_answers(rows: Sequence[Row]) -> list[str]:
    """What error feedback does, for methods measured with and without."""
    answers, fed = [], {}
    known = [row for row in rows if row["nmse_of_sum"] is not None]
    for row in sorted(known, key=lambda row: not row["error_feedback"]):
        method, error = (row["method"], row["algorithm"]), row["nmse_of_sum"]
        if row["error_feedback"]:
            fed[method] = error
        elif method in fed:
            answers.append(
                f"{' by '.join(method)} loses {digits(error)} of the sum, with error feedback "
                f"{digits(fed[method])}: {'less' if fed[method] < error else 'not less'}."
            )
    return answers


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
        points = [(row["policy"], "", row["error"], row["ratio"]) for row in mine if row["error"]]
        title = "" if found else "What compression costs what error?"
        chart = lines(points, "error", "fp32 bytes over payload bytes", log_x=True, log_y=True)
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
        points, cells = [], []
        for place, name in enumerate(names, start=1):
            points += [(policy, "", place, bits[name]) for policy, bits in plans.items()]
            cells.append([str(place), name, *(digits(bits[name]) for bits in plans.values())])
        title = "" if found else "How many bits does each layer get?"
        caption = (
            f"{_where(mine[0])}, {family} around {reference}. Layers in the model's order; those "
            "without a choice, as vectors are, are left out."
        )
        chart = lines(points, "layer", "payload bits per value")
        found.append(Question(title, (), chart, caption, Table(["", "layer", *plans], cells)))
    return found
