"""The report on `gradwire probe`: the links between ranks, messages by size, and kernels."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.bench.report import svg
from gradwire.bench.report.kinds import Row
from gradwire.bench.report.lines import Axes, Line, lines
from gradwire.bench.report.parts import Cell, Figure, Question, Section, Table
from gradwire.bench.report.quantities import DASH, digits, network, plural, seconds, short, size
from gradwire.bench.report.rows import grouped

_LINKS = "How fast are the links?"
_SENDS = "How long does a message take?"
_KERNELS = "What do codecs cost on this machine?"
_VALUES = (1e4, 1e5, 1e6, 1e7)
_PALETTE = ("g0", "t1", "g1", "g3", "g2", "t3", "g4", "t2", "t0")


def sections(rows: Sequence[Row]) -> list[Section]:
    """One per run."""
    return [_section(mine) for mine in grouped(rows, "ranks", "net", "run").values()]


def _section(rows: Sequence[Row]) -> Section:
    first = rows[0]
    by: dict[str, list[Row]] = {"pair": [], "send": [], "curve": []}
    for row in rows:
        by[row["part"]].append(row)
    kept = next((f" Links are of {r['measured']}." for r in by["pair"] if r["cached"]), "")
    about = f"{plural(first['ranks'], 'rank')}, {network(first['net'])}.{kept}"
    made = [(_pairs, by["pair"]), (_sends, by["send"]), (_kernels, by["curve"])]
    return Section("The network, probed", [about], [make(mine) for make, mine in made if mine])


def _pairs(pairs: Sequence[Row]) -> Question:
    table = [
        [
            Cell(f"{row['from']} to {row['to']}"),
            Cell(seconds(row["alpha"]), True),
            Cell(_rate(row), True),
        ]
        for row in pairs
    ]
    slow = max(pairs, key=lambda row: float(row["beta"]))
    far = max(pairs, key=lambda row: float(row["alpha"]))
    answers = [
        (
            f"The slowest is {slow['from']} to {slow['to']}: {_rate(slow)}. The longest latency is "
            f"{seconds(far['alpha'])}, {far['from']} to {far['to']}."
        )
    ]
    return Question(_LINKS, answers, table=Table(["ranks", "latency", "bandwidth"], table))


def _rate(row: Row) -> str:
    """The bandwidth in bits per second."""
    return DASH if not row["bandwidth"] else f"{short(row['bandwidth'])}bit/s"


def _sends(sends: Sequence[Row]) -> Question:
    ordered = sorted(sends, key=lambda row: int(row["bytes"]))
    line = Line(
        "rank 0 to rank 1", svg.Stroke("var(--g0)"), [row["bytes"] for row in ordered],
        [row["seconds"] for row in ordered],
    )  # fmt: skip
    axes = Axes("bytes of a message", "seconds", _SENDS, log_x=True, log_y=True)
    table = [[Cell(size(r["bytes"]), True), Cell(seconds(r["seconds"]), True)] for r in ordered]
    figure = Figure("Medians of several messages.", lines([line], axes))
    return Question(_SENDS, (), figure, Table(["message", "takes"], table))


def _kernels(curves: Sequence[Row]) -> Question:
    drawn = []
    for colour, ((codec,), mine) in zip(_PALETTE, grouped(curves, "codec").items(), strict=False):
        for row in mine:
            if row["form"] in ("encode", "decode"):
                dashes = "" if row["form"] == "encode" else "6 3"
                stroke = svg.Stroke(f"var(--{colour})", dashes)
                took = [row["call"] + values * row["value"] for values in _VALUES]
                drawn.append(Line(f"{codec}, {row['form']}", stroke, _VALUES, took))
    axes = Axes("values of fp32", "seconds", _KERNELS, log_x=True, log_y=True)
    table = [
        [
            Cell(row["codec"]), Cell(row["form"]), Cell(seconds(row["call"]), True),
            *(Cell(f"{digits(1e9 * row[key])} ns", True) for key in ("value", "payload")),
        ]
        for row in curves
    ]  # fmt: skip
    figure = Figure("Solid: encode; dashed: decode.", lines(drawn, axes)) if drawn else None
    headings = ["codec", "form", "per call", "per value", "per value of a payload"]
    return Question(_KERNELS, (), figure, Table(headings, table))
