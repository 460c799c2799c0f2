"""The report on `gradwire sim`: predicted seconds along what was swept, and against the lab."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire.bench.report import svg
from gradwire.bench.report.bars import Bar, Dots, bars, dots
from gradwire.bench.report.kinds import Row
from gradwire.bench.report.lines import Axes, Line, lines
from gradwire.bench.report.parts import Cell, Figure, Question, Section, Table
from gradwire.bench.report.quantities import (
    DASH,
    digits,
    network,
    percent,
    seconds,
    size,
    time_unit,
)
from gradwire.bench.report.rows import grouped
from gradwire.lab import Network

_VALIDATED = "How far are predictions from what the lab measures?"


def sections(rows: Sequence[Row]) -> list[Section]:
    """One section per model, network or swept network, and swept parameter."""
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        swept = row.get("sweep")
        net = None if swept in ("rate", "latency") else row["net"]
        ranks = None if swept == "ranks" else row["ranks"]
        runs.setdefault((row["model"], net, ranks, swept, str(row.get("machine"))), []).append(row)
    return [_section(mine) for mine in runs.values()]


def _section(rows: Sequence[Row]) -> Section:
    first = rows[0]
    swept = first.get("sweep")
    machine = first.get("machine", "a machine that the rows do not name")
    told = "Predicted, not measured: the engine's own scheduler on a virtual clock, "
    about = [f"{told}with kernels' times from {machine}."]
    where = [] if swept == "ranks" else [f"{first['ranks']} ranks"]
    where += [] if swept in ("rate", "latency") else [network(first["net"])]
    about.append(f"Gradients of {first['model']}; {', '.join(where)}.")
    places = [_place(row) for row in rows]
    numeric = swept is not None and all(place is not None for place in places)
    title = (
        f"How long does a step's communication take, by {swept}?"
        if swept
        else ("How long does a step's communication take?")
    )
    figure = _lines(rows, str(swept), title) if numeric else _bars(rows, title)
    caption = "Seconds of the collectives of one step. " + (
        "Dotted: the limit of the wire." if numeric else "The tick is the limit of the wire."
    )
    table = [
        [
            *([Cell(str(row.get("value")), numeric)] if swept else []),
            Cell(row["codec"]),
            Cell(row["algorithm"]),
            Cell(seconds(row["seconds"]), True),
            Cell(seconds(row["limit_seconds"]), True),
            Cell(size(row["wire_bytes"]), True),
            Cell(f"{row['messages']:,}", True),
        ]
        for row in rows
    ]
    headings = [*([str(swept)] if swept else []), "codec", "algorithm", "predicted", "limit"]
    headings += ["sent per rank", "messages"]
    question = Question(title, (), Figure(caption, figure), Table(headings, table))
    return Section(f"Simulation of {first['model']}", about, [question])


def _lines(rows: Sequence[Row], swept: str, title: str) -> str:
    names = grouped(rows, "codec", "algorithm")
    # Codecs are told apart by colour; here all are gradwire's, so that names carry no family.
    strokes = svg.strokes(f"{'torch' if at % 2 else ''}{name}" for at, name in enumerate(names))
    drawn = []
    for name, stroke in zip(names, strokes.values(), strict=False):
        mine = sorted(names[name], key=lambda row: _place(row) or 0.0)
        drawn.append(
            Line(
                ", ".join(map(str, name)),
                stroke,
                [_place(row) or 0.0 for row in mine],
                [row["seconds"] for row in mine],
                limit=[row["limit_seconds"] or None for row in mine],
            )
        )
    places = sorted({_place(row) or 0.0 for row in rows})
    wide = places[0] > 0 and places[-1] >= 8 * places[0]
    unit = {"rate": "rate, bit/s", "latency": "latency, s"}.get(swept, swept)
    axes = Axes(unit, "seconds", title, log_x=wide, log_y=True, x_ticks=_apart(places))
    return lines(drawn, axes)


def _apart(places: Sequence[float]) -> Sequence[float]:
    """The places themselves, where their labels have room."""
    return places if len(places) <= 8 else ()


def _bars(rows: Sequence[Row], title: str) -> str:
    unit, scale = time_unit(row["seconds"] for row in rows)
    drawn = []
    for row in rows:
        value = f"{row['sweep']}={row['value']}, " if "sweep" in row else ""
        limit = row["limit_seconds"]
        drawn.append(
            Bar(
                f"{value}{row['codec']}, {row['algorithm']}",
                "var(--g0)",
                [row["seconds"] / scale],
                seconds(row["seconds"]),
                limit=None if limit is None else limit / scale,
            )
        )
    return bars(drawn, f"{unit} per step", title)


def _place(row: Row) -> float | None:
    """Where a row stands along the sweep; None where that is no number."""
    if row.get("sweep") in ("rate", "latency"):
        net = Network.parse(row["net"], emulated=False)
        return net.rate_bits_per_s if row["sweep"] == "rate" else net.latency_s
    value = row.get("value")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def validation(rows: Sequence[Row]) -> list[Section]:
    """`gradwire sim --validate`: simulated against measured."""
    points, table = [], []
    for row in rows:
        label = (
            f"{row['method'].removeprefix('gradwire:')}, {row['algorithm']}, {row['ranks']} ranks"
        )
        times = [("measured", row["measured_seconds"]), ("simulated", row["simulated_seconds"])]
        points.append(Dots(label, times))
        table.append(
            [
                Cell(row["method"]),
                Cell(row["algorithm"]),
                Cell(str(row["ranks"]), True),
                Cell(network(row["net"])),
                Cell(seconds(row["measured_seconds"]), True),
                Cell(seconds(row["simulated_seconds"]), True),
                Cell(percent(1 + row["error"]), True),
                Cell(percent(1 + row["spread"]) if row.get("runs", 1) > 1 else DASH, True),
            ]
        )
    errors = [abs(row["error"]) for row in rows]
    noisy = sum(abs(row["error"]) <= row["spread"] for row in rows)
    answer = (
        f"Predictions are off by {digits(max(errors) * 100, 2)} % at most; {noisy} of {len(rows)} "
        "are within what the lab itself varies by."
    )
    headings = ["method", "algorithm", "ranks", "network", "measured", "simulated", "error"]
    figure = Figure("The least median of the runs in the lab.", dots(points, "seconds", _VALIDATED))
    question = Question(_VALIDATED, [answer], figure, Table([*headings, "spread of runs"], table))
    return [Section("The simulator against the lab", (), [question])]
