"""The report on `bench transports` and `bench profile`, and on rows of a kind it does not know."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gradwire.bench.report import svg
from gradwire.bench.report.bars import Bar, bars
from gradwire.bench.report.kinds import Row
from gradwire.bench.report.lines import Axes, Line, lines
from gradwire.bench.report.parts import Cell, Figure, Question, Section, Table
from gradwire.bench.report.quantities import (
    DASH,
    digits,
    network,
    plural,
    seconds,
    size,
    time_unit,
)
from gradwire.bench.report.rows import grouped

_LATENCY = "How long does a message take between two processes?"
_COST = "Where does the time of a step's communication go?"
_PARTS = {
    "hook": "DDP's thread, until the bucket is handed over",
    "compute": "Python of the compute lane",
    "inbound": "Python of the inbound lanes, and checksums of what came",
    "outbound": "Python of the outbound lanes",
    "python": "hook, compute, inbound and outbound together",
    "queueing": "steps that were ready and waited for their thread",
    "wire": "posting messages and waiting for them",
    "kernels": "kernels, and checksums of what is sent",
    "bucket": "from the hook's call to the average in place",
    "overhead": "the bucket less its kernels",
    "backward": "the whole backward pass",
    "compile_1024": "compiling such a bucket for 1024 ranks, once",
}


def transports(rows: Sequence[Row]) -> list[Section]:
    """Latency against size, and throughput."""
    by_name = grouped(rows, "transport")
    drawn = []
    for stroke, ((name,), mine) in zip(_strokes(len(by_name)), by_name.items(), strict=True):
        ordered = sorted(mine, key=lambda row: row["bytes"])
        latencies = [row["latency_us"] for row in ordered]
        drawn.append(Line(str(name), stroke, [row["bytes"] for row in ordered], latencies))
    axes = Axes(
        "bytes of a message", "latency, µs", _LATENCY, log_x=True, log_y=True,
        x_ticks=sorted({row["bytes"] for row in rows}),
    )  # fmt: skip
    caption = "Half the time there and back; medians over messages and turns."
    table = [
        [
            Cell(row["transport"]),
            Cell(size(row["bytes"]), True),
            Cell(seconds(row["latency_us"] * 1e-6), True),
            Cell(f"{digits(row['gbps'])} GB/s", True),
        ]
        for row in rows
    ]
    headings = ["transport", "message", "latency", "several in flight"]
    figure = Figure(caption, lines(drawn, axes))
    question = Question(_LATENCY, (), figure, Table(headings, table))
    return [Section("Transports", ["Two processes of one machine, in turns."], [question])]


def _strokes(count: int) -> list[svg.Stroke]:
    names = [f"{'' if at % 2 == 0 else 'torch'}{at}" for at in range(count)]
    found = svg.strokes(names)
    return [found[name] for name in names]


def profile(rows: Sequence[Row]) -> list[Section]:
    """Parts of a step, a section per method, network and number of ranks."""
    runs = grouped(rows, "method", "net", "ranks", "numel")
    return [_profile(mine) for mine in runs.values()]


def _profile(rows: Sequence[Row]) -> Section:
    first = rows[0]
    unit, scale = time_unit(row["seconds"] for row in rows)
    drawn = [
        Bar(row["part"], "var(--g0)", [row["seconds"] / scale], seconds(row["seconds"]))
        for row in rows
    ]
    table = [
        [
            Cell(row["part"]),
            Cell(_PARTS.get(row["part"], DASH)),
            Cell(seconds(row["seconds"]), True),
            Cell(str(row.get("steps", DASH)), True),
        ]
        for row in rows
    ]
    about = f"{first['method']}, {first['ranks']} ranks, {network(first['net'])}; "
    about += f"a gradient of {first['numel']:,} values."
    caption = (
        "Medians over steps on rank 0. Parts overlap and do not add up: the first five are CPU "
        "time of their threads, the others pass on the clock."
    )
    figure = Figure(caption, bars(drawn, unit, _COST))
    question = Question(_COST, (), figure, Table(["part", "what it is", "time", "of steps"], table))
    return Section("Profile of a bucket", [about], [question])


def decisions(rows: Sequence[Row]) -> list[Section]:
    """What policies and automatic mode have decided during training, a section per network."""
    found = []
    for mine in grouped(rows, "task", "net", "ranks").values():
        first = mine[0]
        questions = []
        for of in grouped(mine, "method", "seed").values():
            table = [[Cell(f"{row['step']:,}", True), Cell(row["line"])] for row in of]
            named = f"What has {of[0]['method']} decided, seed {of[0]['seed']}?"
            questions.append(Question(named, table=Table(["step", "decision"], table)))
        about = f"{first['task']}, {first['ranks']} ranks, {network(first['net'])}."
        found.append(Section("Decisions during training", [about], questions))
    return found


def unknown(rows: Sequence[Row]) -> list[Section]:
    """Rows that no other part knows: said so, and shown under their own keys."""
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(tuple(key for key in row if key != "run"), []).append(row)
    questions = []
    for keys, mine in kinds.items():
        table = Table(keys, [[_plain(row[key]) for key in keys] for row in mine])
        questions.append(Question(f"{plural(len(mine), 'row')}", table=table))
    about = (
        "The report has no figure for these rows: no benchmark of this version writes such keys. "
        "They are listed as they are, without units."
    )
    return [Section("Rows of an unknown kind", [about], questions)]


def _plain(value: object) -> Cell:
    if value is None:
        return Cell(DASH)
    if isinstance(value, bool | str):
        return Cell(str(value))
    if isinstance(value, int | float):
        return Cell(f"{value:,}" if isinstance(value, int) else digits(value, 4), True)
    return Cell(json.dumps(value))
