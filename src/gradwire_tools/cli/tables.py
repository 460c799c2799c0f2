"""Tables for people: short headings, and no word broken, however narrow the terminal.

Times are in milliseconds and sizes in MB (10^6 bytes), whatever the rows have. Columns are as wide
as their cells where the terminal has room, and wrap between words where it has not. Where even the
longest words do not fit side by side, columns that are the same in all rows are told once, above
the table; then borders go; and where none of that helps, each row is a list of lines instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwire_tools.bench.quantities import network, plural

HEADINGS = {
    "communication_seconds": "network (ms)",
    "weights_wire_bytes": "weights (MB)",
    "gradients_wire_bytes": "gradients (MB)",
    "synchronisation_seconds": "synced (ms)",
    "uncompressed_seconds": "plain (ms)",
    "wire_bytes": "sent (MB)",
    "seconds": "time (ms)",
    "bytes": "size (MB)",
    "nbytes": "size (MB)",
    "latency_us": "latency (ms)",
    "alpha": "latency (ms)",
    "beta": "1 MB (ms)",
    "bandwidth": "Mbit/s",
    "gbps": "GB/s",
    "nmse": "NMSE",
    "numel": "values",
    "error_feedback": "feedback",
    "error_metric": "error",
    "orthogonal_share": "orthogonal",
    "partition_ratio": "in parts",
    "op": "kernel",
}  # of keys that the rules of `heading` do not make short and plain
_FACTORS = {"latency_us": 1e-3, "alpha": 1e3, "beta": 1e9, "bandwidth": 1e-6, "nbytes": 1e-6}
_UNITS = {"seconds": ("ms", 1e3), "bytes": ("MB", 1e-6)}  # by how keys end


def show(
    console: Console, rows: Sequence[dict[str, Any]], columns: Sequence[str], frame: bool = True
) -> None:
    """Print the values of `columns`, keys of the rows; with a frame, where there is room."""
    whole = [[heading(key), *(_text(key, one.get(key)) for one in rows)] for key in columns]
    same = [column for column in whole if len(rows) > 1 and len({*column[1:]}) == 1]
    other = [column for column in whole if column not in same]
    for framed, told in ((True, whole), (True, other), (False, whole), (False, other)):
        widths = _widths(console.width, told, framed)
        if widths is None or framed > frame:
            continue
        if told is other:
            said = ", ".join(" ".join(column[:2]) for column in same)
            console.print(Text(f"In all rows: {said}."))
        table = Table() if framed else Table(box=None, padding=(0, 2, 0, 0))
        for (title, *_), width in zip(told, widths, strict=True):
            table.add_column(title, width=width, overflow="fold")
        for row in list(zip(*told, strict=True))[1:]:
            table.add_row(*map(Text, row))
        console.print(table)
        return
    for index in range(len(rows)):
        if index:
            console.print()
        for title, *cells in whole:
            console.print(Text(f"{title}: {cells[index]}"), soft_wrap=True)


def where(rows: Sequence[dict[str, Any]]) -> str:
    """A title: of a model, the ranks and the network, those that are the same in all rows."""
    first = rows[0]
    said = {"model": first["model"], "ranks": plural(first["ranks"], "rank")}
    said["net"] = network(first["net"])
    return ", ".join(said[key] for key in said if all(row[key] == first[key] for row in rows))


def _widths(most: int, columns: Sequence[Sequence[str]], framed: bool) -> list[int] | None:
    """The characters of each column, within `most` in all; None if a word would be broken."""
    room = most - (3 * len(columns) + 1 if framed else 2 * len(columns))
    words = [max(map(cell_len, " ".join(cells).split()), default=1) for cells in columns]
    lines = [max(map(cell_len, cells)) for cells in columns]
    count = max(1, len(columns))
    for size in range(most * count, -1, -1):
        limit, more = divmod(size, count)  # of columns that can wrap; one more of the first ones
        limits = [limit + (at < more) for at in range(len(columns))]
        widths = list(map(max, words, map(min, lines, limits)))
        if sum(widths) <= room:
            return widths
    return None


def heading(column: str) -> str:
    """Of a key: in words, with the unit in which `show` prints it."""
    name, _, end = column.rpartition("_")
    said = f"{name} ({_UNITS[end][0]})" if end in _UNITS else column
    return HEADINGS.get(column, said.replace("_", " "))


def _factor(column: str) -> float:
    """From what a row has to what is printed."""
    _, usual = _UNITS.get(column.rpartition("_")[2], ("", 1.0))
    return _FACTORS.get(column, usual)


def _text(column: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and _factor(column) != 1:
        return _number(value * _factor(column))
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, dict):
        words = {True: "true", False: "false"}  # as users write options
        return ", ".join(
            f"{name}={words[one] if isinstance(one, bool) else _text(name, one)}"
            for name, one in value.items()
        )
    if isinstance(value, list | tuple):
        return ", ".join(_text(column, one) for one in value)
    return "-" if value is None else str(value)


def _number(value: float) -> str:
    """With four digits, and no exponent where it would be short enough without."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
