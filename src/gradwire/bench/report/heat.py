"""Figures of tiles: a ratio for each row and column, in colours that diverge from 1.

A gain and a loss of the same factor are equally strong: blue and vermilion, which people with
colour-blindness tell apart. Tiles also say it by a sign: ▲ gain, ▼ loss, ≈ neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.bench.report import svg
from gradwire.bench.report.gain import Gain, Standing, strength
from gradwire.bench.report.quantities import digits

STRONGEST = 0.55  # opacity at which text still reads on a tile
_WEAKEST = 0.12
_HEIGHT, _PITCH = 22.0, 40.0
_SIGNS = {Standing.GAIN: "▲ ", Standing.LOSS: "▼ ", Standing.NOISE: "≈ ", Standing.UNJUDGED: "? "}
_WORDS = {
    Standing.NEVER: "▼ never",
    Standing.ONLY: "▲ only it",
    Standing.TIMING: "timing",
    Standing.UNKNOWN: "–",
}


@dataclass(frozen=True)
class TileRow:
    """A name, and a tile per column; None where nothing was measured."""

    label: str
    tiles: Sequence[Gain | None]


def tiles(columns: Sequence[Sequence[str]], rows: Sequence[TileRow], title: str) -> str:
    """The figure; a column's name has lines. Names of rows stand above their tiles."""
    legend = [
        (_box(Standing.LOSS, 0.25), "▼ 4 times slower, or more"),
        (_box(Standing.GAIN, 4.0), "▲ 4 times faster, or more"),
        (_box(Standing.NOISE, 1.0), "≈ within noise"),
        (_box(Standing.UNJUDGED, 1.0), "? not judged"),
    ]
    found, top = svg.legend(legend, 0.0)
    wide = svg.WIDTH / max(1, len(columns))
    deep = max((len(lines) for lines in columns), default=1)
    for place, lines in enumerate(columns):
        for level, text in enumerate(lines):
            middle = (place + 0.5) * wide
            text = svg.shortened(text, wide)
            found.append(svg.text(middle, top + 14 + 14 * level, text, "middle", soft=True))
    top += 14 * deep + 6
    for at, row in enumerate(rows):
        y = top + _PITCH * at
        found.append(svg.text(1, y + 12, svg.shortened(row.label, svg.WIDTH)))
        for place, gain in enumerate(row.tiles):
            found += _tile(gain, place * wide + 1, y + 16, wide - 2)
    return svg.figure(found, top + _PITCH * len(rows) + 4, title)


def _tile(gain: Gain | None, x: float, y: float, width: float) -> list[str]:
    middle = svg.text(x + width / 2, y + 15.5, _written(gain), "middle")
    return [svg.element("rect", x=x, y=y, width=width, height=_HEIGHT, **_look(gain)), middle]


def _written(gain: Gain | None) -> str:
    if gain is None or gain.ratio is None:
        return _WORDS[gain.standing] if gain is not None else "–"
    if gain.standing is Standing.BAR:
        return "1×"
    return f"{_SIGNS[gain.standing]}{digits(gain.ratio)}×"


def _box(standing: Standing, ratio: float) -> str:
    return svg.element("rect", y=-6, width=22, height=12, **_look(Gain(standing, ratio)))


def _look(gain: Gain | None) -> dict[str, object]:
    """Fill and border. Only what was judged has a colour."""
    if gain is None:
        return {"fill": "none"}
    if gain.standing is Standing.NEVER:
        return {"fill": "var(--loss)", "fill_opacity": STRONGEST}
    if gain.standing is Standing.ONLY:
        return {"fill": "var(--gain)", "fill_opacity": STRONGEST}
    if gain.standing in (Standing.GAIN, Standing.LOSS) and gain.ratio is not None:
        opacity = _WEAKEST + (STRONGEST - _WEAKEST) * strength(gain.ratio)
        colour = "gain" if gain.standing is Standing.GAIN else "loss"
        return {"fill": f"var(--{colour})", "fill_opacity": round(opacity, 3)}
    unjudged = gain.standing is Standing.UNJUDGED
    return {
        "fill": "none",
        "stroke": "var(--soft)" if unjudged else "var(--line)",
        "stroke_dasharray": "3 3" if unjudged else None,
    }
