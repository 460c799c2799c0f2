"""Tables for people: short headings, and no word broken, however narrow the terminal.

Columns are as wide as their cells where the terminal has room, and wrap between words where it has
not. Where even the longest words do not fit side by side, each row is a list of lines instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

HEADINGS = {
    "step_seconds": "step (s)",
    "compute_seconds": "compute (s)",
    "communication_seconds": "communication (s)",
    "exposed_seconds": "exposed (s)",
    "measured_seconds": "measured (s)",
    "simulated_seconds": "simulated (s)",
    "seconds": "time (s)",
    "wire_bytes": "wire bytes",
    "weights_wire_bytes": "weights (bytes)",
    "gradients_wire_bytes": "gradients (bytes)",
    "of_limit": "of limit",
    "error_feedback": "feedback",
    "nmse": "NMSE",
    "input_bits": "input bits",
    "packed_bits": "packed bits",
    "gradient_norm": "gradient norm",
    "nbytes": "bytes",
    "latency_us": "latency (us)",
    "gbps": "GB/s",
}  # of keys that are long or hide their unit; other keys head their own columns

_FRAME = 3  # characters per column: a border and a space on either side; one border more at the end


def show(console: Console, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Print the values of `columns`, keys of the rows."""
    headings = [HEADINGS.get(column, column) for column in columns]
    cells = [[_text(row.get(column)) for column in columns] for row in rows]
    widths = _widths([headings, *cells], console.width - _FRAME * len(columns) - 1)
    if widths is None:
        _show_lines(console, headings, cells)
        return
    table = Table()
    for heading, width in zip(headings, widths, strict=True):
        table.add_column(heading, width=width, overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def _show_lines(console: Console, headings: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """One line per value, and an empty line between rows."""
    for index, row in enumerate(cells):
        if index:
            console.print()
        for heading, cell in zip(headings, row, strict=True):
            console.print(Text(f"{heading}: {cell}"), soft_wrap=True)


def _widths(rows: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """The characters of each column, `room` in all at most; None if a word would be broken."""
    columns = list(zip(*rows, strict=True))
    words = [
        max(cell_len(word) for cell in cells for word in ["", *cell.split()]) for cells in columns
    ]
    whole = [max(map(cell_len, cells)) for cells in columns]
    widths = [max(1, word) for word in words]
    spare = room - sum(widths)
    if spare < 0:
        return None
    while spare and any(width < most for width, most in zip(widths, whole, strict=True)):
        # the narrowest of the columns that lack room
        narrow = min(
            (i for i in range(len(widths)) if widths[i] < whole[i]), key=widths.__getitem__
        )
        widths[narrow] += 1
        spare -= 1
    return widths


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name}={_text(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return "-" if value is None else str(value)
