"""The report on `bench kernels`: each form of a codec against reading and writing its own bytes."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.bench.report.bars import Dots, dots
from gradwire.bench.report.kinds import Row
from gradwire.bench.report.parts import Cell, Figure, Question, Section, Table
from gradwire.bench.report.quantities import DASH, digits, plural, seconds
from gradwire.bench.report.rows import grouped

_TITLE = "How fast are the kernels, against memory?"


def sections(rows: Sequence[Row]) -> list[Section]:
    """One section, with a figure per device, target, number of threads and size."""
    runs = grouped(rows, "device", "target", "threads", "numel")
    return [Section("Kernels", (), [_question(mine, len(runs) > 1) for mine in runs.values()])]


def _question(rows: Sequence[Row], several: bool) -> Question:
    first = rows[0]
    where = f"target {first['target']}, {first.get('device', 'cpu')}"
    where += f", {plural(int(first['threads']), 'thread')}, {first['numel']:,} values"
    named = grouped(rows, "codec", "options")
    points = []
    for (codec, _), mine in named.items():
        shown = [(str(row["op"]), float(row["of_limit"])) for row in mine if row["of_limit"] > 0]
        points.append(Dots(str(codec), shown))
    copies = [row["copy_gbps"] for row in rows if row.get("copy_gbps")]
    answers = [f"{where[0].upper()}{where[1:]}."]
    if copies:
        answers.append(
            f"A copy in the same run moves {digits(min(copies))} to {digits(max(copies))} GB/s, "
            "read and written."
        )
    slow = [row for row in rows if row["of_limit"] < 0.1]
    if slow:
        text = f"{len(slow)} of {len(rows)} take more than ten times what memory alone would."
        answers.append(text)
    caption = (
        "1 is what a copy of as many bytes takes; further left is slower. Values are medians. "
        "Where a codec needs a number of the whole row first, its values count twice."
    )
    figure = dots(points, "limit of memory / time", _TITLE, (1.0, "speed of a copy"))
    table = [
        [
            Cell(str(row["codec"])),
            Cell(_options(row)),
            Cell(str(row["op"])),
            Cell(seconds(row["seconds"]), True),
            Cell(f"{digits(row['gbps'])} GB/s", True),
            Cell(seconds(row.get("limit_seconds")), True),
            Cell(digits(row["of_limit"], 2), True),
        ]
        for row in rows
    ]
    headings = ["codec", "options", "op", "time", "uncompressed bytes", "limit", "limit / time"]
    title = f"{_TITLE[:-1]} ({where})?" if several else _TITLE
    return Question(title, answers, Figure(caption, figure), Table(headings, table))


def _options(row: Row) -> str:
    options = row.get("options")
    if not isinstance(options, dict) or not options:
        return DASH
    return ", ".join(f"{name}={value}" for name, value in options.items())
