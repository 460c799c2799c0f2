"""Figures of bars: one quantity of several things, with spread, parts and limits; and of dots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire_tools.bench import quantities
from gradwire_tools.report import svg

_RIGHT = 330.0  # of the longest bar; the values stand beyond it
_NAMES = 128.0  # the column of names beside dots
_OPACITY = (0.4, 1.0)

Dots = tuple[str, Sequence[tuple[str, float]]]  # a row's label; (name of the series, value)


@dataclass(frozen=True)
class Bar:
    """A bar, below its label.

    Attributes:
        parts: in seconds or bytes, stacked, the first one pale.
        spread: (low, high) of the whole.
        limit: a tick.
        colour: by the label unless given.
    """

    label: str
    parts: Sequence[float]
    spread: tuple[float, float] | None = None
    limit: float | None = None
    colour: str = ""


def bars(
    drawn: Sequence[Bar], per: str, title: str, parts: Sequence[str] = (), sizes: bool = False
) -> str:
    """The figure; `per` follows the unit on the axis, `parts` are the names of the bars' parts, and
    `sizes` are bytes, not seconds."""
    entries = []
    for name, opacity in zip(parts, _OPACITY, strict=True) if parts else ():
        entries.append((_box("var(--ink)", 22, opacity), name))
    if any(bar.spread is not None for bar in drawn):
        entries.append(('<path d="M0 -4v8M0 0H22M22 -4v8" class="spread"/>', "spread"))
    if any(bar.limit is not None for bar in drawn):
        entries.append(('<path d="M11 -6v12" class="tick"/>', "limit"))
    found, top = svg.legend(entries, 0.0)
    top += 2
    bottom = top + 35 * len(drawn)
    ends = [max(sum(bar.parts), bar.limit or 0.0, *(bar.spread or ())) for bar in drawn]
    units, form = (
        (quantities.SIZES, quantities.size) if sizes else (quantities.TIMES, quantities.seconds)
    )
    unit, one = quantities.unit_of(units, max(ends))
    axis = svg.Scale(0.0, max(ends) / one or 1.0, 1.0, _RIGHT)
    found += svg.bottom_axis(axis, top, bottom, f"{unit} {per}", axis.ticks(5))
    strokes = svg.strokes(bar.label for bar in drawn)
    scale = svg.Scale(0.0, max(ends) or one, 1.0, _RIGHT)
    for place, bar in enumerate(drawn):
        y = top + 35 * place
        found.append(svg.text(1, y + 12, svg.shortened(bar.label, svg.WIDTH)))
        colour = bar.colour or strokes[bar.label].colour
        found += _bar(bar, y + 23, scale, _OPACITY if len(parts) > 1 else (1.0,), colour)
        found.append(svg.text(scale(ends[place]) + 5, y + 27, form(sum(bar.parts))))
    return svg.figure(found, bottom + 36, title)


def _bar(
    bar: Bar, middle: float, scale: svg.Scale, opacities: Sequence[float], colour: str
) -> list[str]:
    found, begin = [], 0.0
    for part, opacity in zip(bar.parts, opacities, strict=False):
        x, end = scale(begin), scale(begin + part)
        box = _box(colour, max(end - x, 0.0), opacity)
        found.append(svg.element("g", box, transform=f"translate({x:.2f} {middle:.2f})"))
        begin += part
    if bar.spread is not None:
        low, high = scale(bar.spread[0]), scale(bar.spread[1])
        path = f"M{low:.1f} {middle - 4}v8M{low:.1f} {middle}H{high:.1f}M{high:.1f} {middle - 4}v8"
        found.append(svg.element("path", d=path, class_="spread"))
    if bar.limit is not None:
        at = scale(bar.limit)
        found.append(svg.line(at, middle - 8, at, middle + 8, "tick"))
    return found


def _box(colour: str, width: float, opacity: float) -> str:
    pale = opacity if opacity < 1 else None
    return svg.element("rect", y=-6, width=width, height=12, fill=colour, fill_opacity=pale)


def dots(rows: Sequence[Dots], axis: str, title: str, rule: tuple[float, str] | None = None) -> str:
    """Positive points of several series on a logarithmic axis, one row each; `rule` is upright."""
    rows = [(label, [point for point in points if point[1] > 0]) for label, points in rows]
    names = dict.fromkeys(name for _, points in rows for name, _ in points)
    looks = {name: _look(place % 6) for place, name in enumerate(names)}
    found, top = svg.legend(
        [(f'<g transform="translate(11 0)">{look}</g>', name) for name, look in looks.items()], 0
    )
    top += 18 if rule is not None else 2
    bottom = top + 18 * len(rows)
    values = [value for _, points in rows for _, value in points]
    scale = svg.logarithmic([*values, *([rule[0]] if rule else [])], _NAMES, 390.0)
    found += svg.bottom_axis(scale, top, bottom, f"{axis} (logarithmic)")
    for place, (label, points) in enumerate(rows):
        middle = top + 18 * place + 9
        found.append(svg.text(_NAMES - 8, middle + 4, svg.shortened(label, _NAMES - 8), "end"))
        found.append(svg.line(_NAMES, middle, 390.0, middle, "grid"))
        for name, value in points:
            where = f"translate({scale(value):.1f} {middle:.1f})"
            found.append(svg.element("g", looks[name], transform=where))
    if rule is not None:
        at = scale(rule[0])
        found.append(svg.line(at, top, at, bottom, "rule"))
        found.append(svg.text(at, top - 6, rule[1], "end" if at > 300 else "middle"))
    return svg.figure(found, bottom + 36, title)


_FORMS = (
    '<circle r="4.2"/>',
    '<rect x="-3.7" y="-3.7" width="7.4" height="7.4"/>',
    '<path d="M0 -5L4.8 3.6H-4.8Z"/>',
    '<path d="M0 -5.2L5.2 0L0 5.2L-5.2 0Z"/>',
    '<path d="M0 5L4.8 -3.6H-4.8Z"/>',
    '<path d="M-4 -1.3h2.7v-2.7h2.6v2.7H4v2.6H1.3V4h-2.6V1.3H-4Z"/>',
)


def _look(place: int) -> str:
    """A mark that differs from the others in colour and in form."""
    fill = f"var(--{svg.PALETTE[place]})"
    return svg.element("g", _FORMS[place], fill=fill, stroke="var(--card)", stroke_width=0.8)
