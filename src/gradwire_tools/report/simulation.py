"""The report on `gradwire sim`: predicted seconds along what was swept, under FSDP2, and against
the lab."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire_tools.bench.quantities import digits, network, percent, seconds, times
from gradwire_tools.predict.sim_sweep import place
from gradwire_tools.report import svg
from gradwire_tools.report.bars import Bar, bars, dots
from gradwire_tools.report.kinds import Row
from gradwire_tools.report.lines import Axes, Line, lines
from gradwire_tools.report.parts import Figure, Question, Section, table
from gradwire_tools.report.rows import grouped

_SHARDED = "How long does a step take under FSDP2?"
_VALIDATED = "How far are predictions from what the lab measures?"


def collectives(rows: Sequence[Row]) -> list[Section]:
    """One section per model, network or swept network, and swept parameter."""
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        swept = row.get("sweep")
        net = None if swept in ("rate", "latency") else row["net"]
        ranks = None if swept == "ranks" else row["ranks"]
        runs.setdefault((row["model"], net, ranks, swept, str(row.get("machine"))), []).append(row)
    return [_collectives(mine) for mine in runs.values()]


def _collectives(rows: Sequence[Row]) -> Section:
    first = rows[0]
    swept = first.get("sweep")
    machine = first.get("machine", "a machine that the rows do not name")
    told = "Predicted, not measured: the engine's own scheduler on a virtual clock, "
    about = [f"{told}with kernels' times from {machine}."]
    where = [] if swept == "ranks" else [f"{first['ranks']} ranks"]
    where += [] if swept in ("rate", "latency") else [network(first["net"])]
    about.append(f"Gradients of {first['model']}; {', '.join(where)}.")
    numeric = swept is not None and all(place(row) is not None for row in rows)
    title = "How long does a step's communication take" + (f", by {swept}?" if swept else "?")
    figure = _lines(rows, str(swept), title) if numeric else _bars(rows, title)
    caption = "Seconds of the collectives of one step. " + (
        "Dotted: the limit of the wire." if numeric else "The tick is the limit of the wire."
    )
    columns = "{swept} = value | " if swept else ""
    columns += "codec | algorithm | predicted = seconds | limit = limit_seconds | "
    columns += "sent per rank = wire_bytes | messages"
    shown = table(rows, columns, swept=str(swept))
    question = Question(title, (), Figure(caption, figure), shown)
    return Section(f"Simulation of {first['model']}", about, [question])


def _lines(rows: Sequence[Row], swept: str, title: str) -> str:
    rows = sorted(rows, key=lambda row: place(row) or 0.0)
    named = grouped(rows, "codec", "algorithm")
    strokes = svg.plain(", ".join(map(str, name)) for name in named)
    drawn = [
        Line(
            label,
            stroke,
            [place(row) or 0.0 for row in mine],
            [row["seconds"] for row in mine],
            limit=[row["limit_seconds"] or None for row in mine],
        )
        for (label, stroke), mine in zip(strokes.items(), named.values(), strict=False)
    ]
    places = sorted({place(row) or 0.0 for row in rows})
    wide = places[0] > 0 and places[-1] >= 8 * places[0]
    unit = {"rate": "rate, bit/s", "latency": "latency, s"}.get(swept, swept)
    ticks = places if len(places) <= 8 else ()  # labels of more have no room
    return lines(drawn, Axes(unit, "seconds", title, log_x=wide, log_y=True, x_ticks=ticks))


def _bars(rows: Sequence[Row], title: str) -> str:
    drawn = []
    for row in rows:
        value = f"{row['sweep']}={row['value']}, " if "sweep" in row else ""
        label = f"{value}{row['codec']}, {row['algorithm']}"
        drawn.append(Bar(label, [row["seconds"]], None, row["limit_seconds"], "var(--g0)"))
    return bars(drawn, "per step", title)


def sharded(rows: Sequence[Row]) -> Section:
    """Of one model and machine, with a question per network and number of ranks."""
    first = rows[0]
    about = (
        "Predicted, not measured: FSDP2's order of gathers, computing and reduce-scatters on a "
        f"virtual clock, with kernels' times from {first.get('machine') or 'an unnamed machine'}. "
        "Torch's collectives are at their best."
    )
    places = grouped(rows, "net", "ranks", "per_node", "blocking", "forward_seconds", "sweep")
    questions = [_sharded(mine) for mine in places.values()]
    return Section(f"Simulation of {first['model']} under FSDP2", [about], questions)


def _sharded(rows: Sequence[Row]) -> Question:
    first = rows[0]
    drawn, shown = [], []
    for row in rows:
        computing = float(row["forward_seconds"] + row["backward_seconds"])
        parts = [computing, max(row["seconds"] - computing, 0.0)]
        name = f"{row['method']}, {row['algorithm']}"
        if row.get("sweep") not in (None, "rate", "latency", "ranks"):
            name += f", {row['sweep']}={row.get('value')}"
        drawn.append(Bar(name, parts, limit=row["limit_seconds"]))
        ratio = None if row["ratio"] is None else times(row["ratio"])
        shown.append({**row, "method": name, "computing": seconds(computing), "ratio": ratio})
    waits = "; the host waits for collectives" if first["blocking"] else ""
    where = f"{first['ranks']} ranks, {first['per_node']} per node, {network(first['net'])}{waits}"
    title = f"{_SHARDED} {where}"
    caption = (
        "Predicted seconds of a step: forward and backward, then what they do not hide. The tick "
        "is the limit of the wire and of computing."
    )
    columns = (
        "method | predicted = seconds | computing | limit = limit_seconds | "
        "kernels = compute_seconds | weights = weights_wire_bytes | "
        "gradients = gradients_wire_bytes | ratio"
    )
    parts_of = ("computing", "exposed communication")
    figure = Figure(caption, bars(drawn, "per step", title, parts_of))
    return Question(title, (), figure, table(shown, columns))


def validation(rows: Sequence[Row]) -> list[Section]:
    """`gradwire sim --validate`: simulated against measured."""
    points, shown = [], []
    for row in rows:
        spread = percent(1 + row["spread"]) if row.get("runs", 1) > 1 else None
        shown.append({**row, "error": percent(1 + row["error"]), "spread": spread})
        method = row["method"].removeprefix("gradwire:")
        times = [("measured", row["measured_seconds"]), ("simulated", row["simulated_seconds"])]
        points.append((f"{method}, {row['algorithm']}, {row['ranks']} ranks", times))
    most = max(abs(row["error"]) for row in rows)
    noisy = sum(abs(row["error"]) <= row["spread"] for row in rows)
    answer = (
        f"Predictions are off by {digits(most * 100, 2)} % at most; {noisy} of {len(rows)} "
        "are within what the lab itself varies by."
    )
    columns = (
        "method | algorithm | ranks | network = net | measured = measured_seconds | "
        "simulated = simulated_seconds | error | spread of runs = spread"
    )
    figure = Figure("The least median of the runs in the lab.", dots(points, "seconds", _VALIDATED))
    question = Question(_VALIDATED, [answer], figure, table(shown, columns))
    return [Section("The simulator against the lab", (), [question])]
