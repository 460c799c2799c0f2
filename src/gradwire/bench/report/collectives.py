"""The report on `bench collectives`: an all-reduce's time against the limit of the wire."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.bench.baselines import SIXTEEN_BIT
from gradwire.bench.report import svg
from gradwire.bench.report.bars import Bar, bars
from gradwire.bench.report.kinds import Row
from gradwire.bench.report.noise import Spread, Verdict, by_spreads
from gradwire.bench.report.parts import Cell, Figure, Question, Section, Table
from gradwire.bench.report.quantities import (
    DASH,
    digits,
    faster,
    network,
    seconds,
    size,
    than,
    time_unit,
)
from gradwire.bench.report.rows import grouped

_TITLE = "How long does an all-reduce take, against the limit of the wire?"


def sections(rows: Sequence[Row]) -> list[Section]:
    """One section per number of ranks, network and size."""
    return [_section(mine) for mine in grouped(rows, "ranks", "per_node", "net", "numel").values()]


def _section(rows: Sequence[Row]) -> Section:
    first = rows[0]
    baseline = next((row for row in rows if row["method"] == SIXTEEN_BIT), None)
    strokes = svg.strokes(row["method"] for row in rows)
    most = [row["seconds"] for row in rows] + [row["limit_seconds"] or 0.0 for row in rows]
    unit, scale = time_unit(most)
    drawn, table, answers = [], [], []
    for row in rows:
        spread, limit = _quartiles(row), row["limit_seconds"]
        drawn.append(
            Bar(
                row["method"],
                strokes[row["method"]].colour,
                [row["seconds"] / scale],
                seconds(row["seconds"]),
                (spread[0] / scale, spread[1] / scale) if spread else None,
                None if limit is None else limit / scale,
            )
        )
        told, word = _against(row, baseline)
        answers += [told] if told and row["method"] != "torch-fp32" else []
        table.append(
            [
                Cell(row["method"]),
                Cell(f"{row['algorithm']}, {row.get('transport', DASH)}"),
                Cell(seconds(row["seconds"]), True),
                Cell(" to ".join(map(seconds, spread)) if spread else "not recorded", True),
                Cell(word),
                Cell(seconds(limit), True),
                Cell(digits(row["of_limit"], 2), True),
                Cell(size(row["wire_bytes"]), True),
                Cell(digits(row["nmse"], 2), True),
            ]
        )
    if any((row["nmse"] or 0.0) > 1 for row in rows):
        answers.append(
            "An NMSE above 1 is an error larger than the average itself. The gradients of this "
            "benchmark are random and have no low rank: they suit no low-rank method, and such a "
            "method's NMSE says nothing about training."
        )
    headings = ["method", "algorithm, transport", "time", "middle half", f"against {SIXTEEN_BIT}"]
    headings += ["limit", "limit / time", "sent per rank", "NMSE"]
    per_node = first.get("per_node") or 1
    machines = "" if per_node == 1 else f", {per_node} on each machine"
    about = f"{first['ranks']} ranks{machines}, {network(first['net'])}."
    caption = (
        "Median over rounds of the slowest rank; the spread is that of the middle half. The limit "
        "is what the bytes take at the network's rate, plus its latency for each round. NMSE: "
        "squared error of the average, relative to its square."
    )
    figure = Figure(caption, bars(drawn, f"{unit} per all-reduce", _TITLE))
    title = f"All-reduce of {digits(first['numel'] / 1e6)} M values"
    return Section(title, [about], [Question(_TITLE, answers, figure, Table(headings, table))])


def _against(row: Row, baseline: Row | None) -> tuple[str, str]:
    """A row against the baseline, as a sentence and for the table."""
    if baseline is None or row is baseline or not baseline["seconds"]:
        return "", DASH
    verdict = by_spreads(_quartiles(row), _quartiles(baseline))
    compared = faster(row["seconds"], baseline["seconds"])
    told = than(compared, str(baseline["method"]))
    if verdict is Verdict.NOISE:
        compared, told = verdict.value, f"about as fast as {baseline['method']}, within noise"
    elif verdict not in (Verdict.LESS, Verdict.MORE):
        compared, told = f"{compared}, {verdict.value}", f"{told} ({verdict.value})"
    told = f"{row['method']} is {told}; its average has an NMSE of {digits(row['nmse'], 2)}."
    return told, compared


def _quartiles(row: Row) -> Spread | None:
    found = row.get("seconds_quartiles")
    return (float(found[0]), float(found[1])) if found else None
