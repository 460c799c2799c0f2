"""Where a command's rows, tables and progress go.

Rows go to the file or stream of --json, tables to standard output (to standard error, if rows go to
standard output), progress to standard error: bars on a terminal, plain lines otherwise.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gradwire.cli.options import writable
from gradwire.errors import ConfigError

Row = dict[str, Any]
Advance = Callable[[str, int, int], None]  # what is measured, how much is done, of how much

_BETWEEN_LINES_S = 2.0


class Output:
    """Where rows, tables and progress of one command go.

    Attributes:
        console: for tables.
        remarks: for progress, on standard error.
    """

    def __init__(self, file: Path | None, stream: TextIO | None) -> None:
        self._file = file
        self._stream = stream
        self.console = Console(stderr=stream is not None)
        self.remarks = Console(stderr=True)

    def row(self, row: Row) -> None:
        """Write a row at once. A number that JSON lacks becomes null."""
        if self._file is not None and self._stream is None:
            self._stream = self._file.open("w")  # now, so that a failed command keeps the old file
        if self._stream is not None:
            self._stream.write(json.dumps(_finite(row), allow_nan=False) + "\n")
            self._stream.flush()

    def rows(self, rows: Iterable[Row], columns: list[str]) -> list[Row]:
        """Write each row as it comes; at the end print a table of `columns` for people."""
        kept = []
        for row in rows:
            self.row(row)
            kept.append(row)
        self.table(kept, columns)
        return kept

    def measured(
        self, measure: Callable[[Advance], Iterable[Row]], columns: list[str]
    ) -> list[Row]:
        """As `rows`, of rows that take long to make: `measure` is told how to report progress."""
        kept = []
        with _progress(self.remarks) as advance:
            for row in measure(advance):
                self.row(row)
                kept.append(row)
        self.table([row for row in kept if row.keys() & set(columns)], columns)
        return kept

    def table(self, rows: list[Row], columns: list[str]) -> None:
        table = Table()
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(_text(row.get(column)) for column in columns))
        self.console.print(table)

    def say(self, text: str) -> None:
        """Print a sentence for people, after a table."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._file is not None and self._stream is not None:
            self._stream.close()


@contextmanager
def output(destination: str | None) -> Iterator[Output]:
    """An Output for --json's argument; the file is closed at the end.

    Raises:
        ConfigError: the file cannot be written.
    """
    if destination == "":
        raise ConfigError("--json is empty: give a file, or - for standard output")
    file = None if destination in (None, "-") else Path(str(destination))
    writable("--json", file)
    made = Output(file, sys.stdout if destination == "-" else None)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def _progress(console: Console) -> Iterator[Advance]:
    """What shows progress on `console`: a bar on a terminal, else a line every 2 seconds."""
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("starting", total=None)
        yield lambda what, done, total: bars.update(
            task, description=what, completed=done, total=total
        )


def _lines(console: Console) -> Advance:
    last: list[Any] = ["", 0.0]  # what, when

    def advance(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != last[0] or now - last[1] >= _BETWEEN_LINES_S:
            last[:] = [what, now]
            console.print(f"{what}: {done} of {total}", highlight=False, soft_wrap=True)

    return advance


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name}={_text(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return "-" if value is None else str(value)
