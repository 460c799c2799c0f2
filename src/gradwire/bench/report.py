"""`gradwire report FILE...`: one self-contained HTML page from the rows of any benchmark.

Rows are sorted by what they are, not by where they came from: rows of `bench train` become curves
of loss against time and against steps, rows of `bench kernels` and `bench collectives` bars against
their limits, and rows that this page does not know become plain tables, so nothing that was
measured is left out. Nothing is fetched from anywhere when the page is opened.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A table's cell: its text, and whether it is a number, and a good or a bad one."""

    text: str
    number: bool = False
    verdict: str = ""  # "", "good" or "bad"


@dataclass(frozen=True)
class Table:
    """A table with a caption; every row has a cell per heading."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Figure:
    """A plot as inline SVG, and what it shows in words."""

    caption: str
    svg: str


@dataclass(frozen=True)
class Section:
    """A part of the page: findings in sentences, then figures, then tables."""

    title: str
    findings: Sequence[str]
    figures: Sequence[Figure]
    tables: Sequence[Table]


def write(
    files: Iterable[Path],
    page: Path,
    title: str = "gradwire report",
    notes: Sequence[str] = (),
) -> None:
    """Reads rows from `files` (a JSON object a line) and writes the page.

    Raises:
        ConfigError: a file is missing, holds no rows, or a line of it is not a JSON object; or the
            report's packages are not installed.
    """
    rows = [row for file in files for row in read(file)]
    page.write_text(render(rows, title, notes), encoding="utf-8")


def read(file: Path) -> list[Row]:
    """The rows of one file.

    Raises:
        ConfigError: as `write`; the message names file and line.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read rows from {file}: {error}") from error
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{file}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise ConfigError(f"{file}, line {number} is not a JSON object but {kind}")
        rows.append(row)
    if not rows:
        raise ConfigError(f"{file} holds no rows")
    return rows


def render(rows: Sequence[Row], title: str = "gradwire report", notes: Sequence[str] = ()) -> str:
    """The page as HTML.

    Args:
        notes: sentences for its top, such as how a network was chosen.

    Raises:
        ConfigError: matplotlib or jinja2 is not installed.
    """
    check_packages()
    import jinja2

    template = resources.files("gradwire.bench").joinpath("report.html.j2").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        title=title,
        notes=notes,
        sections=sections(rows),
        rows=len(rows),
        date=datetime.date.today().isoformat(),
    )


def check_packages() -> None:
    """Whether a report can be made: before hours of measuring, not after.

    Raises:
        ConfigError: matplotlib or jinja2 is not installed.
    """
    for package in ("matplotlib", "jinja2"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"the report needs {package}, which is not installed: "
                "pip install 'gradwire[report]'"
            )


def sections(rows: Sequence[Row]) -> list[Section]:
    """The page's parts, in a fixed order, each row in exactly one."""
    from gradwire.bench import report_other, report_train

    train_keys = {"row", "task", "method", "net", "ranks"}
    collective_keys = {"method", "algorithm", "seconds", "limit_seconds", "nmse"}
    kinds: list[tuple[set[str], Callable[[list[Row]], list[Section]]]] = [
        (train_keys, report_train.sections),
        (collective_keys, report_other.collectives),
        ({"codec", "op", "gbps"}, report_other.kernels),
        (set(), report_other.plain),
    ]
    left = list(rows)
    found: list[Section] = []
    for keys, make in kinds:
        mine = [row for row in left if keys <= row.keys()]
        left = [row for row in left if not keys <= row.keys()]
        if mine:
            found += make(mine)
    return found
