"""What the page is made of: sections of questions, each with an answer, a chart and a table; and
the colours of charts.

Hues follow Okabe and Ito, whose colours people with colour-blindness tell apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire_tools.bench.quantities import DASH, spelled
from gradwire_tools.report.gain import Gain
from gradwire_tools.report.rows import Row

COLOURS = {  # in light and in dark
    "ground": ("#ffffff", "#0d1117"), "card": ("#f6f8fa", "#161b22"),
    "ink": ("#1f2328", "#e6edf3"), "soft": ("#57606a", "#9aa4ae"), "line": ("#d8dee4", "#30363d"),
    "t0": ("#6e7781", "#9aa4ae"), "t1": ("#0072b2", "#56a8f0"), "t2": ("#2492c9", "#7fd0f5"),
    "t3": ("#8a5fc0", "#bc9cf0"), "g0": ("#d55e00", "#ff8c42"), "g1": ("#00805e", "#2fc79b"),
    "g2": ("#a87400", "#e8b33f"), "g3": ("#b0307a", "#f07ab8"), "g4": ("#7a5230", "#c79a6d"),
}  # fmt: skip
PALETTE = ("g0", "t1", "g1", "g3", "g2", "t3", "g4", "t2", "t0")  # neighbours differ most
GAIN, LOSS = "t1", "g0"
COMPUTING = ("computing", "exposed communication")  # parts of a step
_TORCH, _WARM = ("t0", "t1", "t2", "t3"), ("g0", "g1", "g2", "g3", "g4")
_DASHES = ("-", "--", ":", "-.")

Look = tuple[str, str]  # a colour, and a style of lines
Values = Sequence[float | None]


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        y: None where there is no value: the line has a gap there.
        low, high: the band around the line; empty for none.
        limit: a thin dotted line of the same colour; empty for none.
        wide: drawn wide and pale, for a line that others cover.
        mark: a point on the line that the chart is about.
    """

    label: str
    look: Look
    x: Sequence[float]
    y: Values
    low: Values = ()
    high: Values = ()
    limit: Values = ()
    wide: bool = False
    mark: tuple[float, float] | None = None


@dataclass(frozen=True)
class Lines:
    """A quantity along another; `rule` is a level across the chart, and its label."""

    lines: Sequence[Line]
    x: str
    y: str
    rule: tuple[float, str] | None = None
    log_x: bool = False
    log_y: bool = False
    x_ticks: Sequence[float] = ()


@dataclass(frozen=True)
class Bar:
    """A bar below its label.

    Attributes:
        parts: in seconds or bytes, stacked.
        spread: (low, high) of the whole.
        limit: a tick.
        colour: by the label unless given.
    """

    label: str
    parts: Sequence[float]
    spread: tuple[float, float] | None = None
    limit: float | None = None
    colour: str = ""


@dataclass(frozen=True)
class Bars:
    """One quantity of several things; `per` follows the unit on the axis, `parts` are the names of
    the bars' parts, of which the first is pale, and `sizes` are bytes, not seconds."""

    bars: Sequence[Bar]
    per: str = "per step"
    parts: Sequence[str] = ()
    sizes: bool = False


@dataclass(frozen=True)
class Dots:
    """Positive points of named series on a logarithmic axis, a row per label; `rule` is upright."""

    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]
    x: str
    rule: tuple[float, str] | None = None


@dataclass(frozen=True)
class TileChart:
    """A gain per row and column, None where nothing was measured; columns are networks."""

    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Gain | None]]]


Chart = Lines | Bars | Dots | TileChart


def looks(names: Iterable[str]) -> dict[str, Look]:
    """How each name is drawn in every chart. Torch's methods are grey and blue, and others beside
    them warm; where there are none of torch's, others have all colours."""
    distinct = dict.fromkeys(names)
    torchs = [name for name in distinct if name.startswith("torch")]
    others = [name for name in distinct if not name.startswith("torch")]
    found = {}
    for colours, family in ((_TORCH, torchs), (_WARM if torchs else PALETTE, others)):
        for place, name in enumerate(family):
            turn, colour = divmod(place, len(colours))
            found[name] = (colours[colour], _DASHES[turn % len(_DASHES)])
    return found


def series(points: Iterable[Sequence[Any]], solid: str = "") -> list[Line]:
    """A line for each (name, note) with which points begin, from left to right: a colour for each
    name, dashed where the note is not `solid`. The values that follow are those of `Line`."""
    found: dict[tuple[str, str], list[Sequence[Any]]] = {}
    for name, note, *point in points:
        found.setdefault((name, note), []).append(point)
    look = looks(name for name, _ in found)
    lines = []
    for (name, note), mine in found.items():
        label = f"{name}, {note}" if note else name
        own = look[name] if note == solid else (look[name][0], "--")
        columns: Any = zip(*sorted(mine, key=lambda point: float(point[0])), strict=True)
        lines.append(Line(label, own, *columns))
    return lines


def lines(points: Iterable[Sequence[Any]], x: str, y: str, solid: str = "", **fields: Any) -> Lines:
    """The chart of a `series`, with other fields of `Lines`."""
    return Lines(series(points, solid), x, y, **fields)


_UNIT = r"%|[kMGµmn]?(s|B|bit/s|B/s)"
_NUMBER = re.compile(rf"{DASH}|[-+]?\d[\d.,e+-]*×?( ({_UNIT})( to .*)?)?")


@dataclass(frozen=True)
class Table:
    """A table; every row has a cell per heading."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def numbers(self) -> list[bool]:
        """Of each column whether it holds numbers; the first one has the rows' names."""
        columns = zip(*self.rows, strict=True)
        return [at > 0 and all(map(_NUMBER.fullmatch, cells)) for at, cells in enumerate(columns)]


@dataclass(frozen=True)
class Question:
    """A question, its answer in sentences, and what the answer rests on: a chart, with what it
    shows in words, and a table."""

    title: str
    answers: Sequence[str] = ()
    chart: Chart | None = None
    caption: str = ""
    table: Table | None = None


@dataclass(frozen=True)
class Section:
    """A part of the page: one experiment, or one kind of rows."""

    title: str
    about: Sequence[str] = ()
    questions: Sequence[Question] = ()


def table(
    rows: Sequence[Row], columns: str, **given: str | Callable[[Row], object]
) -> Table | None:
    """A table of rows; None without any.

    Args:
        columns: "HEADING | HEADING = KEY | ...": without a key the heading is one, too. A text
            under it is told as it is, a number in the unit that the key's name says.
        given: a text, which stands in a heading for {NAME}; or a function of a row, which says what
            stands under the key NAME.
    """
    pairs = [column.strip().partition(" = ") for column in columns.split("|")]
    cells = []
    for row in rows:
        made = {name: of(row) for name, of in given.items() if callable(of)}
        keys = (key or heading for heading, _, key in pairs)
        cells.append([spelled(key, made[key] if key in made else row.get(key)) for key in keys])
    return Table([heading.format(**given) for heading, *_ in pairs], cells) if cells else None
