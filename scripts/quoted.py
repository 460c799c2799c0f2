"""Whether the figures that pages quote are those of the stored rows.

    python scripts/quoted.py         # what is quoted and not found, or not read: exit code 1
    python scripts/quoted.py --read  # all of it was read against the rows: write that

A passage names its rows in bench/results/: a line of docs/laboratory/fidelity.md in its cells; a
paragraph, list or table of any page in a comment on the line above it:

    <!-- rows: train-gpt train-image -->
    On `gpt` 4 bits arrive 2.5 times as soon as ...

Each of its figures has to be a value of these rows, rounded as it is quoted (as it is, in
thousandths, in per cent, in millions), or one that `gradwire report FILE --table` prints. What is
neither (a ratio of two methods, a difference of paired losses) stands in bench/quoted.json as
derived by hand. Figures of one digit, and those in code and in links, are not looked at.

Many values make chance likely: a figure of two digits whose last is wrong is found all the same in
three of four cases, of three digits in two of three. So bench/quoted.json has a digest of the rows
against which a passage was read, too: once they change, somebody has to read it again.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError
from gradwire_tools.report import tables
from gradwire_tools.report.rows import read, sort

ROOT = Path(__file__).parents[1]
CLAIMS = "docs/laboratory/fidelity.md"
_COMMENT = re.compile(r"<!-- rows: (.*?) -->\n(.*?)(?=\n\n|\Z)", re.DOTALL)
_IGNORED = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL)
_FIGURE = re.compile(r"(?<![\w.])(?<![A-Za-z]-)\d*\.?\d+(?![\w.]*\w)")  # ResNet-50 is a name
_SCALES = (1, 1000, 100, 1e-6)
_SERIES = 12  # longer lists are curves, of which nothing is quoted


@dataclass(frozen=True)
class Passage:
    """Text that quotes figures of rows.

    Attributes:
        page: its path from the root.
        begins: how it begins.
        rows: names of files of rows.
        figures: in their order, as quoted.
    """

    page: str
    begins: str
    rows: tuple[str, ...]
    figures: tuple[str, ...]


def passages(root: Path = ROOT) -> Iterator[Passage]:
    """Of README and the documentation."""
    for file in (root / "README.md", *sorted(root.glob("docs/**/*.md"))):
        page, text = str(file.relative_to(root)), file.read_text("utf-8")
        for names, body in _COMMENT.findall(text):
            yield Passage(page, " ".join(body.split()[:8]), tuple(names.split()), _figures(body))
        if page == CLAIMS:
            for line in text.splitlines():
                cells = line.split(" | ")
                if len(cells) != 5:
                    continue
                named = re.findall(r"`([\w-]+)`", " | ".join(cells[2:4]))
                rows = tuple(name for name in named if _file(root, name).exists())
                if rows:
                    claim = cells[0].removeprefix("| ")
                    yield Passage(page, claim, rows, _figures(" | ".join(cells[3:])))


def missing(passage: Passage, root: Path = ROOT) -> list[str]:
    """Its figures that are neither values of its rows nor in their tables.

    Raises:
        ConfigError: it names rows that are not there.
    """
    for name in passage.rows:
        if not _file(root, name).exists():
            raise ConfigError(f"{passage.page}: '<!-- rows: {name} -->': there are no such rows")
    return [f for f in passage.figures if not any(_has(root, name, f) for name in passage.rows)]


def complaints(root: Path = ROOT) -> list[str]:
    """A line per passage that was not read against the rows that are there, per figure that is not
    found, and per derived figure that is not quoted."""
    checked = json.loads(_checked(root).read_text("utf-8"))
    found = []
    for passage in passages(root):
        known = checked.get(passage.page, {}).pop(passage.begins, None) or {"rows": {}}
        lost, derived = missing(passage, root), known.get("figures", ())
        where = f"{passage.page}: {passage.begins!r}"
        new = [name for name in passage.rows if known["rows"].get(name) != _digest(root, name)]
        if new:
            found.append(f"{where} was not read against these rows of {', '.join(new)}")
        for figure in lost:
            if figure not in derived:
                found.append(f"{where} quotes {figure}, which {', '.join(passage.rows)} lack")
        for figure in derived:
            if figure not in lost:
                found.append(f"{where} no longer quotes {figure}, or no longer has to derive it")
    for page, rest in checked.items():
        found += [f"{page} has no passage {begins!r}" for begins in rest]
    return found


def write(root: Path = ROOT) -> None:
    """Take all passages as read against the rows that are there, and what is not found as derived
    from them."""
    checked: dict[str, Any] = {}
    for passage in passages(root):
        of: dict[str, Any] = {"rows": {name: _digest(root, name) for name in passage.rows}}
        if lost := missing(passage, root):
            of["figures"] = list(dict.fromkeys(lost))
        checked.setdefault(passage.page, {})[passage.begins] = of
    lines = [
        f" {json.dumps(page)}: {{\n"
        + ",\n".join(f"  {json.dumps(begins)}: {json.dumps(of)}" for begins, of in mine.items())
        + "\n }"
        for page, mine in checked.items()
    ]
    _checked(root).write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def _checked(root: Path) -> Path:
    return root / "bench" / "quoted.json"


def _figures(text: str) -> tuple[str, ...]:
    quoted = _FIGURE.findall(_IGNORED.sub(" ", text))
    return tuple(figure for figure in quoted if len(figure.replace(".", "").lstrip("0")) > 1)


def _has(root: Path, name: str, figure: str) -> bool:
    places, value = len(figure.partition(".")[2]), float(figure)
    values, printed = _known(_file(root, name))
    return figure.lstrip("0") in printed or any(
        round(known * scale, places) == value for known in values for scale in _SCALES
    )


@cache
def _known(file: Path) -> tuple[frozenset[float], frozenset[str]]:
    """(values of rows, without signs; figures that tables of them print, without a leading 0)."""
    values: set[float] = set()
    found = read(file)
    for row in found:
        if row.get("row") not in ("evaluation", "step"):
            values.update(_numbers({key: of for key, of in row.items() if key != "run"}))
    made = [make(sort(found)) for make, _ in tables.KINDS.values()]
    printed = (figure.lstrip("0") for figure in _FIGURE.findall("\n".join(made)))
    return frozenset(values), frozenset(printed)


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield abs(float(value))
    elif isinstance(value, dict | list) and (isinstance(value, dict) or len(value) <= _SERIES):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _numbers(one)


def _file(root: Path, name: str) -> Path:
    return root / "bench" / "results" / f"{name}.jsonl"


@cache
def _digest(root: Path, name: str) -> str:
    return hashlib.sha256(_file(root, name).read_bytes()).hexdigest()[:12]


def main(arguments: Sequence[str]) -> int:
    if "--read" in arguments:
        write()
    found = complaints()
    print("\n".join(found) or "all figures that name their rows are theirs")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
