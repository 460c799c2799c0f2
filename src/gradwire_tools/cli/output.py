"""Where a command's rows, tables and progress go.

Rows go to the file or stream of --json, tables to standard output (to standard error, if rows go to
standard output), progress to standard error: bars on a terminal, plain lines otherwise.
"""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from gradwire.errors import ConfigError
from gradwire_tools.bench.progress import Advance, watched
from gradwire_tools.bench.rows import finite
from gradwire_tools.cli import tables
from gradwire_tools.cli.options import unwritable, writable

Row = dict[str, Any]

_BETWEEN_LINES_S = 2.0


class Output:
    """Where rows, tables and progress of one command go.

    Attributes:
        console: for tables.
        remarks: for progress, on standard error.
    """

    def __init__(self, destination: str | None) -> None:
        if destination == "":
            raise ConfigError("--json is empty: give a file, or - for standard output")
        self._file = Path(destination) if destination and destination != "-" else None
        self._stream: TextIO | None = sys.stdout if destination == "-" else None
        writable("--json", self._file)
        self.console = Console(stderr=self._stream is not None)
        self.remarks = Console(stderr=True)

    def row(self, row: Row) -> None:
        """Write a row at once. A number that JSON lacks becomes null.

        Raises:
            ConfigError: the file cannot be written, such as on a full disk.
        """
        with self._named():
            if self._file is not None and self._stream is None:
                self._stream = self._file.open("w")  # now: a failed command keeps the old file
            if self._stream is not None:
                self._stream.write(json.dumps(finite(row), allow_nan=False) + "\n")
                self._stream.flush()

    def each(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Write each row as it comes, and yield it."""
        for row in rows:
            self.row(row)
            yield row

    def rows(self, rows: Iterable[Row], columns: list[str]) -> list[Row]:
        """Write each row as it comes; at the end print a table of `columns` for people."""
        kept = list(self.each(rows))
        self.table(kept, columns)
        return kept

    def measured(self, rows: Iterable[Row], columns: list[str]) -> list[Row]:
        """As `rows`, of rows that take long to make: their progress is shown."""
        kept = self.quiet(rows)
        self.table([row for row in kept if row.keys() & set(columns)], columns)
        return kept

    def quiet(self, rows: Iterable[Row]) -> list[Row]:
        """As `measured`, without the table."""
        with _progress(self.remarks) as advance, watched(advance):
            return list(self.each(rows))

    def table(
        self, rows: list[Row], columns: list[str], framed: bool = True, title: str = ""
    ) -> None:
        """Print a table of `columns`, keys of the rows, for people; its title on a line above."""
        self.say(title)
        tables.show(self.console, rows, columns, framed)

    def say(self, text: str) -> None:
        """Print sentences for people, in lines of 80 characters at most."""
        width = min(80, self.console.width)
        for line in text.splitlines():
            for part in textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False):
                self.console.print(part, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Close the file; raises ConfigError if what it still holds back cannot be written."""
        if self._file is not None and self._stream is not None:
            with self._named():
                self._stream.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the file in its errors; a reader that left a pipe is no error of the file's."""
        try:
            yield
        except OSError as error:
            if self._file is None or isinstance(error, BrokenPipeError):
                raise
            raise unwritable("--json", self._file, error) from error


@contextmanager
def output(destination: str | None) -> Iterator[Output]:
    """An Output for --json's argument; the file is closed at the end.

    Raises:
        ConfigError: the file cannot be written.
    """
    made = Output(destination)
    try:
        yield made
    finally:
        made.close()


def measured(
    json_file: str | None, columns: list[str], run: Callable[..., Iterable[Row]], *given: Any,
    **options: Any,
) -> None:  # fmt: skip
    """Do what a command does whose rows `run` yields: write them, and print a table of `columns`.

    Args:
        given, options: arguments of `run`.
    """
    with output(json_file) as out:
        out.measured(run(*given, **options), columns)


@contextmanager
def _progress(console: Console) -> Iterator[Advance]:
    """What shows progress on `console`: a bar on a terminal, else a line every 2 seconds.

    The first step of every phase has a line, too.
    """
    if not console.is_terminal:
        yield _lines(console)
        return
    named = Column(max_width=40, no_wrap=True, overflow="ellipsis")  # a line holds all columns
    columns = (
        TextColumn("{task.description}", table_column=named), BarColumn(20), MofNCompleteColumn(),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("starting", total=None)
        yield lambda what, done, total: bars.update(
            task, description=what, completed=done, total=total
        )


def _lines(console: Console) -> Advance:
    last = 0.0

    def advance(what: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == 0 or now - last >= _BETWEEN_LINES_S:
            last = now
            console.print(f"{what}: {done} of {total}", highlight=False, soft_wrap=True)

    return advance
