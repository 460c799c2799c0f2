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

HEADINGS = {
    "communication_seconds": "network (ms)",
    "weights_wire_bytes": "weights (MB)",
    "gradients_wire_bytes": "gradients (MB)",
    "synchronisation_seconds": "synced (ms)",
    "uncompressed_seconds": "plain (ms)",
    "coalesce_bytes": "coalesce (MB)",
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
    "of_uniform": "of uniform",
    "ms_per_million": "ms per million",
    "orthogonal_share": "orthogonal",
    "state_bytes_per_value": "state bytes per value",
    "partition_ratio": "in parts",
    "op": "kernel",
}  # of keys that the rules of `heading` do not make short and plain
_FACTORS = {"latency_us": 1e-3, "alpha": 1e3, "beta": 1e9, "bandwidth": 1e-6, "nbytes": 1e-6}

_FRAME = 3  # characters per column: a border and a space on either side; one border more at the end
_BARE = 2  # without borders


def show(console: Console, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Print the values of `columns`, keys of the rows."""
    whole = [[heading(column) for column in columns]]
    whole += [[_text(column, row.get(column)) for column in columns] for row in rows]
    same = [n for n, (_, *cells) in enumerate(zip(*whole, strict=True)) if len({*cells}) == 1]
    same = same if len(rows) > 1 else []
    other = [[cell for n, cell in enumerate(row) if n not in same] for row in whole]
    for frame, table in ((_FRAME, whole), (_FRAME, other), (_BARE, whole), (_BARE, other)):
        widths = _widths(table, console.width, frame)
        if widths is None:
            continue
        if table is other:
            said = ", ".join(f"{whole[0][n]} {whole[1][n]}" for n in same)
            console.print(Text(f"In all rows: {said}."))
        _draw(console, table, widths, frame)
        return
    _show_lines(console, whole[0], whole[1:])


def _draw(
    console: Console, table: Sequence[Sequence[str]], widths: Sequence[int], frame: int
) -> None:
    drawn = Table() if frame == _FRAME else Table(box=None, padding=(0, _BARE, 0, 0))
    for title, width in zip(table[0], widths, strict=True):
        drawn.add_column(title, width=width, overflow="fold")
    for row in table[1:]:
        drawn.add_row(*map(Text, row))
    console.print(drawn)


def heading(column: str) -> str:
    """Of a key: in words, with the unit in which `show` prints it."""
    if column in HEADINGS:
        return HEADINGS[column]
    for end, unit in (("_seconds", "ms"), ("_bytes", "MB")):
        if column.endswith(end):
            return f"{column.removesuffix(end)} ({unit})".replace("_", " ")
    return column.replace("_", " ")


def _factor(column: str) -> float:
    """From what a row has to what is printed."""
    if column in _FACTORS:
        return _FACTORS[column]
    of = {"seconds": 1e3, "bytes": 1e-6}
    return of.get(column.rpartition("_")[2], 1.0)


def _show_lines(console: Console, headings: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """One line per value, and an empty line between rows."""
    for index, row in enumerate(cells):
        if index:
            console.print()
        for heading, cell in zip(headings, row, strict=True):
            console.print(Text(f"{heading}: {cell}"), soft_wrap=True)


def _widths(rows: Sequence[Sequence[str]], most: int, frame: int) -> list[int] | None:
    """The characters of each column, within `most` in all; None if a word would be broken."""
    columns = list(zip(*rows, strict=True))
    room = most - frame * len(columns) - (frame == _FRAME)
    words = [
        max(cell_len(word) for cell in cells for word in ["", *cell.split()]) for cells in columns
    ]
    whole = [max(map(cell_len, cells)) for cells in columns]
    widths = [max(1, word) for word in words]
    spare = room - sum(widths)
    if spare < 0:
        return None
    while spare and any(width < wanted for width, wanted in zip(widths, whole, strict=True)):
        # the narrowest of the columns that lack room
        narrow = min(
            (i for i in range(len(widths)) if widths[i] < whole[i]), key=widths.__getitem__
        )
        widths[narrow] += 1
        spare -= 1
    return widths


def _text(column: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and _factor(column) != 1:
        return _number(value * _factor(column))
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}={_text(name, one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(column, one) for one in value)
    return "-" if value is None else str(value)


def _number(value: float) -> str:
    """With four digits, and no exponent where it would be short enough without."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
