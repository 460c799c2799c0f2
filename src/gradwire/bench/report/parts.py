"""What the page is made of: sections, each of questions, each with an answer, a figure, a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cell:
    """A table's cell: its text, and whether it is a number."""

    text: str
    number: bool = False


@dataclass(frozen=True)
class Table:
    """A table; every row has a cell per heading. A long one is folded; a narrow one
    stands beside its figure, where the screen is wide."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @property
    def folded(self) -> bool:
        return len(self.rows) > 24

    @property
    def narrow(self) -> bool:
        return len(self.headings) <= 6 and not self.folded


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
    questions: Sequence[Question] = field(default_factory=tuple)
