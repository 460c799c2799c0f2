"""Figures of bars: one quantity of several things, with spread, parts and limits; and of dots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.bench.report import svg

_RIGHT = 330.0  # of the longest bar; the values stand beyond it
_NAMES = 128.0  # the column of names beside dots
_OPACITY = (0.4, 1.0)


@dataclass(frozen=True)
class Bar:
    """A bar, below its label.

    Attributes:
        parts: stacked, the first one pale; none where nothing was measured.
        text: what stands at its end.
        spread: (low, high) of the whole.
        limit: a tick.
    """

    label: str
    colour: str
    parts: Sequence[float]
    text: str
    spread: tuple[float, float] | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Dots:
    """Points on a row of their own: (name of the series, value)."""

    label: str
    points: Sequence[tuple[str, float]]


def bars(drawn: Sequence[Bar], unit: str, title: str, parts: Sequence[str] = ()) -> str:
    """The figure; `parts` are the names of the bars' parts."""
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
    ends = [sum(bar.parts) for bar in drawn] + [bar.limit or 0.0 for bar in drawn]
    ends += [bar.spread[1] for bar in drawn if bar.spread is not None]
    high = max(ends) or 1.0
    scale = svg.Scale(0.0, high, 1.0, _RIGHT)
    found += svg.bottom_axis(scale, top, bottom, unit, ticks=scale.ticks(5))
    for place, bar in enumerate(drawn):
        found += _bar(bar, top + 35 * place, scale, len(parts) > 1)
    return svg.figure(found, bottom + 36, title)


def _bar(bar: Bar, top: float, scale: svg.Scale, stacked: bool) -> list[str]:
    found = [svg.text(1, top + 12, svg.shortened(bar.label, svg.WIDTH))]
    middle, from_ = top + 23, 0.0
    for part, opacity in zip(bar.parts, _OPACITY if stacked else (1.0,), strict=False):
        x, end = scale(from_), scale(from_ + part)
        box = _box(bar.colour, max(end - x, 0.0), opacity)
        found.append(svg.element("g", box, transform=f"translate({x:.2f} {middle:.2f})"))
        from_ += part
    reached = from_
    if bar.spread is not None:
        low, high = scale(bar.spread[0]), scale(bar.spread[1])
        path = f"M{low:.1f} {middle - 4}v8M{low:.1f} {middle}H{high:.1f}M{high:.1f} {middle - 4}v8"
        found.append(svg.element("path", d=path, class_="spread"))
        reached = max(reached, bar.spread[1])
    if bar.limit is not None:
        at = scale(bar.limit)
        found.append(svg.line(at, middle - 8, at, middle + 8, "tick"))
        reached = max(reached, bar.limit)
    found.append(svg.text(scale(reached) + 5, middle + 4, bar.text))
    return found


def _box(colour: str, width: float, opacity: float) -> str:
    pale = opacity if opacity < 1 else None
    return svg.element("rect", y=-6, width=width, height=12, fill=colour, fill_opacity=pale)


def dots(rows: Sequence[Dots], axis: str, title: str, rule: tuple[float, str] | None = None) -> str:
    """Positive points of several series on a logarithmic axis, one row each; `rule` is upright."""
    rows = [Dots(row.label, [(n, v) for n, v in row.points if v > 0]) for row in rows]
    names = list(dict.fromkeys(name for row in rows for name, _ in row.points))
    looks = dict(zip(names, _looks(len(names)), strict=True))
    found, top = svg.legend(
        [(f'<g transform="translate(11 0)">{looks[n]}</g>', n) for n in names], 0
    )
    top += 18 if rule is not None else 2
    bottom = top + 18 * len(rows)
    values = [value for row in rows for _, value in row.points]
    scale = svg.logarithmic([*values, *([rule[0]] if rule else [])], _NAMES, 390.0)
    found += svg.bottom_axis(scale, top, bottom, f"{axis} (logarithmic)")
    for place, row in enumerate(rows):
        middle = top + 18 * place + 9
        found.append(svg.text(_NAMES - 8, middle + 4, svg.shortened(row.label, _NAMES - 8), "end"))
        found.append(svg.line(_NAMES, middle, 390.0, middle, "grid"))
        for name, value in row.points:
            where = f"translate({scale(value):.1f} {middle:.1f})"
            found.append(svg.element("g", looks[name], transform=where))
    if rule is not None:
        at = scale(rule[0])
        found.append(svg.line(at, top, at, bottom, "rule"))
        found.append(svg.text(at, top - 6, rule[1], "end" if at > 300 else "middle"))
    return svg.figure(found, bottom + 36, title)


def _looks(count: int) -> list[str]:
    """Marks that differ in colour and in form."""
    forms = (
        '<circle r="4.2"/>',
        '<rect x="-3.7" y="-3.7" width="7.4" height="7.4"/>',
        '<path d="M0 -5L4.8 3.6H-4.8Z"/>',
        '<path d="M0 -5.2L5.2 0L0 5.2L-5.2 0Z"/>',
        '<path d="M0 5L4.8 -3.6H-4.8Z"/>',
        '<path d="M-4 -1.3h2.7v-2.7h2.6v2.7H4v2.6H1.3V4h-2.6V1.3H-4Z"/>',
    )
    colours = ("g0", "t1", "g1", "g3", "g2", "t3")
    return [
        svg.element(
            "g", forms[place % 6], fill=f"var(--{colours[place % 6]})",
            stroke="var(--card)", stroke_width=0.8,
        )
        for place in range(count)
    ]  # fmt: skip
