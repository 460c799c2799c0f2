"""Figures of lines: a quantity along another, with its spread as a band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire_tools.bench.quantities import short
from gradwire_tools.report import svg
from gradwire_tools.report.svg import Stroke

_LEFT, _RIGHT, _PLOT = 40.0, 390.0, 210.0

Values = Sequence[float | None]


@dataclass(frozen=True)
class Line:
    """A line of a figure.

    Attributes:
        y: None where there is no value: the line has a gap there.
        low, high: the band around the line; empty for none.
        limit: a thin dotted line of the same colour; empty for none.
        wide: drawn wide and pale, for a line that others cover.
        mark: a point on the line that the figure is about.
    """

    label: str
    stroke: Stroke
    x: Sequence[float]
    y: Values
    low: Values = ()
    high: Values = ()
    limit: Values = ()
    wide: bool = False
    mark: tuple[float, float] | None = None


@dataclass(frozen=True)
class Axes:
    """What the axes say, and a rule across the plot: its value and its label."""

    x: str
    y: str
    title: str
    rule: tuple[float, str] | None = None
    log_x: bool = False
    log_y: bool = False
    x_ticks: Sequence[float] = ()


def lines(drawn: Sequence[Line], axes: Axes) -> str:
    """The figure, every line to its own end."""
    entries = [(svg.element("path", d="M0 0H22", **_look(one)), one.label) for one in drawn]
    if axes.rule is not None:
        entries.append((svg.line(0, 0, 22, 0, "rule"), axes.rule[1]))
    parts, top = svg.legend(entries, 0.0)
    top += 20
    bottom = top + _PLOT
    xs = [x for one in drawn for x in one.x]
    columns = [column for one in drawn for column in (one.y, one.low, one.high, one.limit)]
    ys = [y for column in columns for y in column if y is not None]
    if axes.rule is not None:
        ys.append(axes.rule[0])
    across = (
        svg.logarithmic(xs, _LEFT, _RIGHT)
        if axes.log_x
        else svg.linear(xs, _LEFT, _RIGHT, zero=True)
    )
    up = svg.logarithmic(ys, bottom, top) if axes.log_y else svg.linear(ys, bottom, top)
    label_x, label_y = (
        f"{label} (logarithmic)" if logarithmic else label
        for label, logarithmic in ((axes.x, axes.log_x), (axes.y, axes.log_y))
    )
    parts += svg.bottom_axis(across, top, bottom, label_x, axes.x_ticks)
    parts.append(svg.text(0, top - 8, label_y))
    for value in up.ticks():
        parts.append(svg.line(_LEFT, up(value), _RIGHT, up(value), "grid"))
        parts.append(svg.text(_LEFT - 5, up(value) + 4, short(value), "end", soft=True))
    for one in drawn:
        parts += _band(one, across, up)
    for one in sorted(drawn, key=lambda each: not each.wide):
        parts += _curve(one, across, up)
    if axes.rule is not None:
        level = up(axes.rule[0])
        parts.append(svg.line(_LEFT, level, _RIGHT, level, "rule"))
    return svg.figure(parts, bottom + 36, axes.title)


def _look(one: Line) -> dict[str, object]:
    return {
        "fill": "none",
        "stroke": one.stroke.colour,
        "stroke_width": 5 if one.wide else 2,
        "stroke_opacity": 0.45 if one.wide else None,
        "stroke_dasharray": one.stroke.dashes,
        "stroke_linejoin": "round",
    }


def _curve(one: Line, across: svg.Scale, up: svg.Scale) -> list[str]:
    parts = []
    dotted = {"stroke_width": 1.2, "stroke_dasharray": "1.5 2.5"}
    for values, look in ((one.y, _look(one)), (one.limit, _look(one) | dotted)):
        for run in _runs(one.x, values, across, up):
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in run)
            parts.append(svg.element("path", d=path, **look))
            if len(run) == 1 and values is one.y:
                parts.append(_dot(*run[0], one.stroke.colour, 2.5))
    if one.mark is not None:
        parts.append(_dot(across(one.mark[0]), up(one.mark[1]), one.stroke.colour, 4.5))
    return parts


def _band(one: Line, across: svg.Scale, up: svg.Scale) -> list[str]:
    edges = [
        (across(x), up(low), up(high))
        for x, low, high in zip(one.x, one.low, one.high, strict=False)
        if low is not None and high is not None and high > low
    ]
    if len(edges) < 2:
        return []
    there = [f"{x:.1f} {high:.1f}" for x, _, high in edges]
    back = [f"{x:.1f} {low:.1f}" for x, low, _ in reversed(edges)]
    path = "M" + "L".join(there + back) + "Z"
    return [svg.element("path", d=path, fill=one.stroke.colour, fill_opacity=0.22)]


def _dot(x: float, y: float, colour: str, radius: float) -> str:
    return svg.element(
        "circle", cx=x, cy=y, r=radius, fill=colour, stroke="var(--card)", stroke_width=1.2
    )


def _runs(
    xs: Sequence[float], ys: Values, across: svg.Scale, up: svg.Scale
) -> list[list[tuple[float, float]]]:
    """The places of the points, in runs without a gap; a gap is what the axes cannot show, too."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(xs, ys, strict=False):
        if y is None or (across.log and x <= 0) or (up.log and y <= 0):
            runs.append([])
        else:
            runs[-1].append((across(x), up(y)))
    return [run for run in runs if run]
