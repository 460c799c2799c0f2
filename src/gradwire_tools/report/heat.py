"""Figures of tiles: a ratio for each row and column, in colours that diverge from 1.

A gain and a loss of the same factor are equally strong: blue and vermilion, which people with
colour-blindness tell apart. Tiles also say it by a sign: ▲ gain, ▼ loss, ≈ neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradwire_tools.bench.quantities import times
from gradwire_tools.report import svg
from gradwire_tools.report.gain import Gain, Standing, strength

STRONGEST = 0.55  # opacity at which text still reads on a tile
_WEAKEST = 0.12
_HEIGHT, _PITCH = 22.0, 40.0
_SIDES = {
    Standing.LOSS: "loss", Standing.NEVER: "loss", Standing.GAIN: "gain", Standing.ONLY: "gain"
}  # fmt: skip
_SIGNS = {Standing.GAIN: "▲ ", Standing.LOSS: "▼ ", Standing.NOISE: "≈ ", Standing.UNJUDGED: "? "}
_WORDS = {
    Standing.NEVER: "▼ never",
    Standing.ONLY: "▲ only it",
    Standing.TIMING: "timing",
    Standing.BAR: "1×",
}

Tiles = tuple[str, Sequence[Gain | None]]  # a name; per column, None where nothing was measured


def tiles(columns: Sequence[Sequence[str]], rows: Sequence[Tiles], title: str) -> str:
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
    for at, (label, gains) in enumerate(rows):
        y = top + _PITCH * at
        found.append(svg.text(1, y + 12, svg.shortened(label, svg.WIDTH)))
        for place, gain in enumerate(gains):
            x, width = place * wide + 1, wide - 2
            box = {"x": x, "y": y + 16, "width": width, "height": _HEIGHT}
            found.append(svg.element("rect", **box, **_look(gain)))
            found.append(svg.text(x + width / 2, y + 31.5, _written(gain), "middle"))
    return svg.figure(found, top + _PITCH * len(rows) + 4, title)


def _written(gain: Gain | None) -> str:
    if gain is None or gain.standing is Standing.UNKNOWN:
        return "–"
    if gain.standing in _WORDS or gain.ratio is None:
        return _WORDS[gain.standing]
    return f"{_SIGNS[gain.standing]}{times(gain.ratio)}"


def _box(standing: Standing, ratio: float) -> str:
    return svg.element("rect", y=-6, width=22, height=12, **_look(Gain(standing, ratio)))


def _look(gain: Gain | None) -> dict[str, object]:
    """Fill and border. Only what was judged has a colour."""
    if gain is None:
        return {"fill": "none"}
    if gain.standing in _SIDES:
        strong = 1.0 if gain.ratio is None else strength(gain.ratio)
        opacity = round(_WEAKEST + (STRONGEST - _WEAKEST) * strong, 3)
        return {"fill": f"var(--{_SIDES[gain.standing]})", "fill_opacity": opacity}
    unjudged = gain.standing is Standing.UNJUDGED
    return {
        "fill": "none",
        "stroke": "var(--soft)" if unjudged else "var(--line)",
        "stroke_dasharray": "3 3" if unjudged else None,
    }
