"""Pictures of charts: SVG by matplotlib, for a page or alone.

A picture is 400 units wide, so that its text keeps its size on a screen of 400 pixels. Its colours
are CSS variables, which `STYLE` defines for light and for dark, and its text is text.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

import numpy as np
from matplotlib import style, ticker
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from gradwire_tools.bench import quantities
from gradwire_tools.bench.quantities import short, times
from gradwire_tools.report import parts
from gradwire_tools.report.gain import Gain, Standing
from gradwire_tools.report.parts import COLOURS, GAIN, LOSS, PALETTE, looks

WIDTH = 400.0
_LEFT = 128.0  # the column of names beside dots
_ROW = 17.0  # of a legend
_LETTER = 7.0  # of a letter of 12 units, roughly
_PALE = 0.4
STRONGEST = 0.55  # opacity at which text still reads on a tile
_WEAKEST = 0.12
_MARKERS = "os^DvP"
_DOTTED = (0, (1.5, 2))
_SPACE = 'xmlns="http://www.w3.org/2000/svg"'
_UNNEEDED = re.compile(r' id="[^"]*_\d+"| transform="rotate\(-0 [^"]*"|font-family: [^;"]*;? ?')
Legend = dict[str, Artist]
Drawn = tuple[float, Legend, dict[str, float]]  # height, legend and room of a plot
_HEX = {name: light for name, (light, _) in COLOURS.items()}
_NAMES = {light: name for name, light in _HEX.items()}


def _variables(scheme: int) -> str:
    return " ".join(f"--{name}: {pair[scheme]};" for name, pair in COLOURS.items())


STYLE = f"""
:root {{ {_variables(0)} }}
@media (prefers-color-scheme: dark) {{
  :root {{ {_variables(1)} }}
}}
svg.figure text {{ font-family: system-ui, "DejaVu Sans", sans-serif; }}
svg.figure * {{ stroke-linejoin: round; }}
"""
_LOOK = str(resources.files("gradwire_tools.report").joinpath("charts.mplstyle"))


def svg(chart: parts.Chart, title: str, salt: str = "") -> str:
    """The chart as an element of a page, whose pictures differ in `salt`; `title` is read to those
    who do not see it."""
    draw: Any = {
        parts.Lines: _lines,
        parts.Bars: _bars,
        parts.Dots: _dots,
        parts.TileChart: _tiles,
    }[type(chart)]
    look: list[Any] = [_LOOK, {"svg.hashsalt": salt}]
    with style.context(look, after_reset=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters without a font here, and axes without values
        figure = Figure()
        axes = figure.add_axes((0, 0, 1, 1))
        plot, legend, room = draw(axes, chart)
        height = _frame(figure, axes, plot, legend, **room)
        for artist in figure.findobj():
            artist.set_clip_on(False)  # all is within; and clip paths would need names
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    drawn = written.getvalue()
    body = drawn[drawn.index("<g ") : drawn.rindex("</svg>")]
    body = re.sub(r"<[a-z][^>]*>", _tag, f"<title>{escape(title)}</title>{body}")
    size = f'viewBox="0 0 {WIDTH:g} {height:g}" width="{WIDTH:g}" height="{height:g}"'
    return f'<svg class="figure" role="img" {_SPACE} {size}>{body}</svg>'


def alone(chart: parts.Chart, heading: str) -> str:
    """A chart as a file of its own below a line of text, on a ground that reads on any page."""
    drawn = svg(chart, heading)
    height = float(re.findall(r'height="(\S+)"', drawn)[0]) + 46
    width = WIDTH + 24
    size = f'width="{1.6 * width:g}" height="{1.6 * height:g}"'
    said = escape(shortened(heading, WIDTH))
    return (
        f'<svg class="figure" {_SPACE} viewBox="0 0 {width:g} {height:g}" {size}>'
        f'<style>{STYLE}</style><rect width="100%" height="100%" rx="6" fill="var(--card)"/>'
        f'<text x="12" y="22" font-size="12" fill="var(--ink)">{said}</text>'
        f'<g transform="translate(12 34)">{drawn}</g></svg>'
    )


def shortened(content: str, width: float) -> str:
    """`content`, or its beginning with an ellipsis if it is wider than `width` units."""
    most = max(2, int(width / _LETTER))
    return content if len(content) <= most else content[: most - 1] + "…"


def _tag(found: re.Match[str]) -> str:
    """A tag as pages need it: no names that another picture has, too, colours of `STYLE`."""
    tag = _UNNEEDED.sub("", found[0]).replace("xlink:href", "href")
    return re.sub("#[0-9a-f]{6}", lambda colour: f"var(--{_NAMES[colour[0]]})", tag)


def _frame(
    figure: Figure,
    axes: Axes,
    plot: float,
    legend: Legend,
    left: float = 4,
    right: float = 10,
    above: float = 4,
    below: float = 36,
) -> float:
    """Places the plot, of `plot` units of height, below the legend; gives the picture's height."""
    labels = [shortened(label, WIDTH - 30) for label in legend]
    columns = int(WIDTH / (40 + _LETTER * max(map(len, labels), default=0))) or 1
    top = _ROW * math.ceil(len(legend) / columns) + above
    height = top + plot + below
    across = (WIDTH - left - right) / WIDTH
    axes.set_position((left / WIDTH, below / height, across, plot / height))
    figure.set_size_inches(WIDTH / 72, height / 72)
    if legend:
        figure.legend(list(legend.values()), labels, ncols=columns, loc="upper left")
    return height


def _ticks(axis: Axis, most: int = 6, at: Sequence[float] = ()) -> None:
    """Round values along an axis."""
    low, high = sorted(axis.get_view_interval())
    if axis.get_scale() == "log" and high > 4 * low:
        subs = (1.0,) if high >= 100 * low else (1.0, 2.0, 5.0)
        axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=most + 1))
    else:
        axis.set_major_locator(ticker.MaxNLocator(most, steps=(1, 2, 5, 10)))
    if at:
        axis.set_ticks(at)
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(lambda value, _: short(value))


def _above(
    axes: Axes, said: str, at: float, units: float, along: str = "data", **look: Any
) -> None:
    """Text above the plot."""
    place = {"xycoords": (along, "axes fraction"), "textcoords": "offset points"}
    axes.annotate(said, (at, 1), (0, units), **{"ha": "center", **place, **look})


def _told(label: str, log: bool) -> str:
    return f"{label} (logarithmic)" if log else label


# ---- lines


def _lines(axes: Axes, chart: parts.Lines) -> Drawn:
    for scale, log in ((axes.set_xscale, chart.log_x), (axes.set_yscale, chart.log_y)):
        scale("log" if log else "linear", **({"nonpositive": "mask"} if log else {}))
    legend: Legend = {line.label: _curve(axes, chart, line) for line in chart.lines}
    if chart.rule is not None:
        level, label = chart.rule
        legend[label] = axes.axhline(level, color=_HEX["ink"], linewidth=1, linestyle=_DOTTED)
    if not chart.log_x:
        axes.set_xlim(left=min([0.0, *(x for line in chart.lines for x in line.x)]))
    _ticks(axes.xaxis, at=chart.x_ticks)
    _ticks(axes.yaxis)
    axes.set_xlabel(_told(chart.x, chart.log_x), loc="right")
    _above(axes, _told(chart.y, chart.log_y), 0, 10, ha="left", along="figure fraction")
    return 210, legend, {"left": 40, "above": 24}


def _curve(axes: Axes, chart: parts.Lines, line: parts.Line) -> Line2D:
    """Draws a line; gives what stands for it in the legend."""
    x, y, low, high, limit = (
        np.array(values, float) for values in (line.x, line.y, line.low, line.high, line.limit)
    )
    shown = np.isfinite(y) & ((y > 0) | (not chart.log_y)) & ((x > 0) | (not chart.log_x))
    beside = np.pad(shown, 1)
    alone = np.flatnonzero(shown & ~beside[:-2] & ~beside[2:]).tolist()  # between two gaps
    colour, dashes = _HEX[line.look[0]], line.look[1]
    own: dict[str, Any] = {"color": colour, "linestyle": dashes}
    if line.wide:
        own |= {"linewidth": 5, "alpha": 0.45, "zorder": 1.9}
    axes.plot(x, y, marker="o", markersize=5, markevery=alone, **own)
    if any(line.limit):
        axes.plot(x, limit, color=colour, linewidth=1.2, linestyle=_DOTTED)
    if (low < high).any():
        axes.fill_between(x, low, high, color=colour, alpha=0.22, linewidth=0)
    if line.mark is not None:
        at, value = line.mark
        axes.plot(at, value, "o", color=colour, markersize=9, markeredgecolor=_HEX["card"])
    return Line2D([], [], **own)


# ---- bars and dots


def _bars(axes: Axes, chart: parts.Bars) -> Drawn:
    ends = [max(sum(bar.parts), bar.limit or 0.0, *(bar.spread or ())) for bar in chart.bars]
    units, form = (
        (quantities.SIZES, quantities.size)
        if chart.sizes
        else (quantities.TIMES, quantities.seconds)
    )
    unit, one = quantities.unit_of(units, max(ends))
    look = looks(bar.label for bar in chart.bars)
    opacities = (_PALE, 1.0) if len(chart.parts) > 1 else (1.0,)
    ink = _HEX["ink"]
    legend: Legend = {
        name: Patch(color=ink, alpha=alpha)
        for name, alpha in zip(chart.parts, opacities, strict=False)
    }
    for place, (bar, end) in enumerate(zip(chart.bars, ends, strict=True)):
        middle, begin = 35 * place + 23, 0.0
        colour = _HEX[bar.colour or look[bar.label][0]]
        for part, alpha in zip(bar.parts, opacities, strict=False):
            axes.barh(middle, part / one, 12, begin / one, color=colour, alpha=alpha)
            begin += part
        if bar.spread is not None:
            bounds = [bound / one for bound in bar.spread]
            (legend["spread"],) = axes.plot(
                bounds, [middle] * 2, "|-", color=ink, linewidth=1.2, markersize=8
            )
        if bar.limit is not None:
            (legend["limit"],) = axes.plot(
                bar.limit / one, middle, "|", color=ink, markersize=16, markeredgewidth=2
            )
        axes.text(0, middle - 11, shortened(bar.label, WIDTH))
        beyond: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
        axes.annotate(form(sum(bar.parts)), (end / one, middle), (5, 0), **beyond)
    axes.set_xlim(0, max(ends) / one or 1)
    axes.set_ylim(35 * len(chart.bars), 0)
    _ticks(axes.xaxis, 5)
    axes.set_yticks([])
    axes.set_xlabel(f"{unit} {chart.per}", loc="right")
    return 35 * len(chart.bars), legend, {"right": 70}


def _dots(axes: Axes, chart: parts.Dots) -> Drawn:
    axes.set_xscale("log", nonpositive="mask")
    points: dict[str, list[tuple[float, int]]] = {}
    for place, (_, row) in enumerate(chart.rows):
        for name, value in row:
            if value > 0:
                points.setdefault(name, []).append((value, place))
    legend: Legend = {}
    for turn, (name, mine) in enumerate(points.items()):
        look: dict[str, Any] = {"color": _HEX[PALETTE[turn % 6]], "markeredgecolor": _HEX["card"]}
        marker = _MARKERS[turn % 6]
        (legend[name],) = axes.plot(*zip(*mine, strict=True), marker, markersize=8, **look)
    if chart.rule is not None:
        level, label = chart.rule
        axes.axvline(level, color=_HEX["ink"], linewidth=1, linestyle=_DOTTED)
        _above(axes, label, level, 6)
    _ticks(axes.xaxis)
    names = [shortened(label, _LEFT - 8) for label, _ in chart.rows]
    axes.set_yticks(range(len(names)), names, color=_HEX["ink"])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(_told(chart.x, True), loc="right")
    return 18 * len(names), legend, {"left": _LEFT, "above": 20 if chart.rule else 4}


# ---- tiles


def _tiles(axes: Axes, chart: parts.TileChart) -> Drawn:
    wide = 1 / max(1, len(chart.columns))
    columns = [
        name.replace(" latency", "").replace(" emulated", "").split(", ") for name in chart.columns
    ]
    for place, lines in enumerate(columns):
        told = "\n".join(shortened(line, WIDTH * wide) for line in lines)
        middle = (place + 0.5) * wide
        _above(axes, told, middle, 4, color=_HEX["soft"])
    for at, (label, gains) in enumerate(chart.rows):
        axes.text(0, 40 * at + 12, shortened(label, WIDTH))
        for place, gain in enumerate(gains):
            corner = (place * wide + 0.002, 40 * at + 16)
            axes.add_patch(Rectangle(corner, wide - 0.004, 22, **tile(gain)))
            middle = (place + 0.5) * wide
            written, _ = _LOOKS[gain.standing if gain else Standing.UNKNOWN]
            ratio = times(gain.ratio or 1.0) if gain else ""
            axes.text(middle, 40 * at + 27, written.format(ratio), ha="center", va="center")
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(40 * len(chart.rows), 0)
    legend: Legend = {label: Patch(**tile(gain)) for label, gain in _LEGEND.items()}
    deep = max((len(lines) for lines in columns), default=1)
    room: dict[str, float] = {"left": 1, "right": 1, "above": 14 * deep + 6, "below": 4}
    return 40 * len(chart.rows), legend, room


_LOOKS = {  # what stands on a tile, for the ratio, and its side
    Standing.GAIN: ("▲ {}", GAIN),
    Standing.LOSS: ("▼ {}", LOSS),
    Standing.NOISE: ("≈ {}", ""),
    Standing.UNJUDGED: ("? {}", ""),
    Standing.NEVER: ("▼ never", LOSS),
    Standing.ONLY: ("▲ only it", GAIN),
    Standing.TIMING: ("timing", ""),
    Standing.BAR: ("1×", ""),
    Standing.UNKNOWN: (quantities.DASH, ""),
}
_LEGEND = {
    "▼ 4 times slower, or more": Gain(Standing.LOSS, 0.25),
    "▲ 4 times faster, or more": Gain(Standing.GAIN, 4.0),
    "≈ within noise": Gain(Standing.NOISE, 1.0),
    "? not judged": Gain(Standing.UNJUDGED, 1.0),
}


def tile(gain: Gain | None) -> dict[str, Any]:
    """Fill and border: only what was judged has a colour, and a loss is as strong as a gain of the
    same factor."""
    if gain is None:
        return {"fill": False, "linewidth": 0}
    _, side = _LOOKS[gain.standing]
    if side:
        strong = 1.0 if gain.ratio is None else min(1.0, abs(math.log(gain.ratio, 4)))
        opacity = _WEAKEST + (STRONGEST - _WEAKEST) * strong
        return {"facecolor": (_HEX[side], opacity), "linewidth": 0}
    unjudged = gain.standing is Standing.UNJUDGED
    border, dashes = ("soft", "--") if unjudged else ("line", "-")
    return {"fill": False, "edgecolor": _HEX[border], "linestyle": dashes}
