"""What the page is made of: sections, each of questions, each with an answer, a figure, a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire_tools.bench.quantities import DASH, spelled
from gradwire_tools.report.kinds import Row

_UNIT = r"%|[kMGµmn]?(s|B|bit/s|B/s)"
_NUMBER = re.compile(rf"{DASH}|[-+]?\d[\d.,e+-]*×?( ({_UNIT})( to .*)?)?")


@dataclass(frozen=True)
class Table:
    """A table; every row has a cell per heading. A long one is folded; a narrow one
    stands beside its figure, where the screen is wide."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def folded(self) -> bool:
        return len(self.rows) > 24

    @property
    def narrow(self) -> bool:
        return len(self.headings) <= 6 and not self.folded

    @property
    def numbers(self) -> list[bool]:
        """Of each column whether it holds numbers; the first one has the rows' names."""
        columns = zip(*self.rows, strict=True)
        return [at > 0 and all(map(_NUMBER.fullmatch, cells)) for at, cells in enumerate(columns)]


def table(rows: Sequence[Row], columns: str, **names: str) -> Table | None:
    """A table of rows; None without any.

    Args:
        columns: "HEADING | HEADING = KEY | ...": without a key the heading is one, too. A text
            under it is told as it is, a number in the unit that the key's name says.
        names: what stands in a heading for {NAME}.
    """
    pairs = [column.strip().partition(" = ") for column in columns.split("|")]
    keys = [key or heading for heading, _, key in pairs]
    cells = [[spelled(key, row.get(key)) for key in keys] for row in rows]
    return Table([heading.format(**names) for heading, *_ in pairs], cells) if cells else None


@dataclass(frozen=True)
class Figure:
    """A plot as inline SVG, and what it shows in words."""

    caption: str
    svg: str


@dataclass(frozen=True)
class Question:
    """A question, its answer in sentences, and what the answer rests on."""

    title: str
    answers: Sequence[str] = ()
    figure: Figure | None = None
    table: Table | None = None


@dataclass(frozen=True)
class Section:
    """A part of the page: one experiment, or one kind of rows."""

    title: str
    about: Sequence[str] = ()
    questions: Sequence[Question] = ()
