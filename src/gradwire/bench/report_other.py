"""The report's parts on kernels, on collectives, and on rows of a kind it does not know."""

from __future__ import annotations

from typing import Any

from gradwire.bench import plots
from gradwire.bench.baselines import SIXTEEN_BIT
from gradwire.bench.report import Cell, Figure, Section, Table
from gradwire.bench.report_format import digits, number, seconds, size, times

Row = dict[str, Any]


def collectives(rows: list[Row]) -> list[Section]:
    """`bench collectives`: seconds of each method against what the wire allows."""
    runs: dict[tuple[Any, Any, Any], list[Row]] = {}
    for row in rows:
        runs.setdefault((row.get("ranks"), row.get("net"), row.get("numel")), []).append(row)
    return [_collective(*key, rows=mine) for key, mine in runs.items()]


def _collective(ranks: Any, net: Any, numel: Any, *, rows: list[Row]) -> Section:
    sixteen = next((row["seconds"] for row in rows if row["method"] == SIXTEEN_BIT), None)
    table = []
    for row in rows:
        against = row["seconds"] / sixteen if sixteen else None
        mine = row["method"].startswith(("gradwire", "qsgd", "terngrad"))
        table.append(
            [
                Cell(str(row["method"])),
                Cell(str(row["algorithm"])),
                Cell(str(row.get("transport", "–"))),
                number(seconds(row["seconds"])),
                times(against, 1.0 if mine else None),
                number(size(row.get("wire_bytes"))),
                number(seconds(row["limit_seconds"])),
                number(digits(row.get("of_limit"), 2)),
                number(digits(row.get("nmse"), 2)),
            ]
        )
    headings = ["method", "algorithm", "transport", "time", f"of {SIXTEEN_BIT}", "sent a rank"]
    headings += ["wire's limit", "of limit", "NMSE"]
    figure = plots.against_limit(
        [str(row["method"]) for row in rows],
        [row["seconds"] for row in rows],
        [row["limit_seconds"] for row in rows],
    )
    return Section(
        f"All-reduce of {digits((numel or 0) / 1e6)} M values: {ranks} ranks, {net}",
        [],
        [Figure("Median time; the tick is what the wire alone would take.", figure)],
        [Table("Times are medians.", headings, table)],
    )


def kernels(rows: list[Row]) -> list[Section]:
    """`bench kernels`: throughput of each form, and how near memory's limit it comes."""
    headings = ["codec", "op", "target", "device", "threads", "values", "time", "GB/s", "of limit"]
    table = [
        [
            Cell(str(row["codec"])),
            Cell(str(row["op"])),
            Cell(str(row.get("target", "–"))),
            Cell(str(row.get("device", "–"))),
            number(str(row.get("threads", "–"))),
            number(f"{row['numel']:,}" if "numel" in row else "–"),
            number(seconds(row.get("seconds"))),
            number(digits(row["gbps"])),
            number(digits(row.get("of_limit"), 2)),
        ]
        for row in rows
    ]
    labels = [
        " ".join(str(row[key]) for key in ("codec", "op", "target", "threads") if key in row)
        for row in rows
    ]
    figure = plots.bars(labels, [row["gbps"] for row in rows], "GB/s of uncompressed values")
    caption = "Uncompressed bytes a second; each bar is codec, operation, target, threads."
    return [
        Section(
            "Kernels",
            [],
            [Figure(caption, figure)],
            [Table("The limit is a copy of the bytes read and written.", headings, table)],
        )
    ]


def plain(rows: list[Row]) -> list[Section]:
    """A table for each set of keys."""
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(tuple(row), []).append(row)
    tables = [
        Table("", list(keys), [[_plain_cell(row[key]) for key in keys] for row in mine])
        for keys, mine in kinds.items()
    ]
    return [Section("Other rows", [], [], tables)]


def _plain_cell(value: Any) -> Cell:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Cell("–" if value is None else str(value))
    return number(f"{value:,}" if isinstance(value, int) else digits(value, 4))
