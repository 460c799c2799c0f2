"""What the report's figures are drawn with: elements of SVG, scales with ticks, styles of methods.

A figure is 400 units wide, so that its text keeps its size on a screen of 400 pixels. Colours are
CSS variables, which `STYLE` defines for light and for dark; the page and a picture that stands
alone share it. Hues follow Okabe and Ito, whose colours people with colour-blindness tell apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from gradwire_tools.bench.quantities import short

WIDTH = 400.0
PALETTE = ("g0", "t1", "g1", "g3", "g2", "t3", "g4", "t2", "t0")  # neighbours differ most
_LETTER = 7.0  # of a letter of 12 units, roughly

STYLE = """
:root {
  --ground: #ffffff; --card: #f6f8fa; --ink: #1f2328; --soft: #57606a; --line: #d8dee4;
  --t0: #6e7781; --t1: #0072b2; --t2: #2492c9; --t3: #8a5fc0;
  --g0: #d55e00; --g1: #00805e; --g2: #a87400; --g3: #b0307a; --g4: #7a5230;
  --gain: #0072b2; --loss: #d55e00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #0d1117; --card: #161b22; --ink: #e6edf3; --soft: #9aa4ae; --line: #30363d;
    --t0: #9aa4ae; --t1: #56a8f0; --t2: #7fd0f5; --t3: #bc9cf0;
    --g0: #ff8c42; --g1: #2fc79b; --g2: #e8b33f; --g3: #f07ab8; --g4: #c79a6d;
    --gain: #56a8f0; --loss: #ff8c42;
  }
}
svg.figure text { fill: var(--ink); font: 12px system-ui, "DejaVu Sans", sans-serif; }
svg.figure text.soft { fill: var(--soft); }
svg.figure .grid { stroke: var(--line); stroke-width: 1; }
svg.figure .axis { stroke: var(--soft); stroke-width: 1; }
svg.figure .tick { stroke: var(--ink); stroke-width: 2; }
svg.figure .spread { stroke: var(--ink); stroke-width: 1.2; fill: none; }
svg.figure .rule { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 2 3; }
"""


@dataclass(frozen=True)
class Stroke:
    """How a method is drawn in every figure: a CSS colour, and the dashes of its lines."""

    colour: str
    dashes: str = ""

    @property
    def dashed(self) -> Stroke:
        return Stroke(self.colour, "6 3")


@dataclass(frozen=True)
class Scale:
    """Values `low` to `high` onto positions `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values within the scale, `most` at most."""
        low, high = self.low, self.high
        if not self.log:
            step = _round_up((high - low) / most)
            first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
            return [place * step for place in range(first, last + 1)]
        first = math.ceil(math.log10(low) - 1e-9)
        last = math.floor(math.log10(high) + 1e-9)
        if last - first < 2:  # less than two decades: 1, 2, 5 of each
            found = [m * 10.0**p for p in range(first - 1, last + 1) for m in (1, 2, 5)]
            found = [v for v in found if low <= v * (1 + 1e-9) and v <= high * (1 + 1e-9)]
            return found if len(found) >= 2 else [low, high]
        every = math.ceil((last - first + 1) / most)
        return [10.0**power for power in range(first, last + 1, every)]


def linear(values: Iterable[float], start: float, end: float, zero: bool = False) -> Scale:
    """A scale with a little room above (and below, unless it begins at zero)."""
    known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = (min(0.0, *known) if zero else min(known)), max(known)
    room = 0.06 * (high - low) or abs(high) or 1.0
    return Scale(low if zero else low - room, high + room, start, end)


def logarithmic(values: Iterable[float], start: float, end: float) -> Scale:
    """A logarithmic scale over the positive values, with a little room on both sides."""
    known = [value for value in values if value > 0 and math.isfinite(value)] or [1.0, 10.0]
    low, high = min(known), max(known)
    room = (high / low) ** 0.06 if high > low else 2.0
    return Scale(low / room, high * room, start, end, log=True)


def _round_up(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= step * (1 - 1e-9))


def strokes(names: Iterable[str]) -> dict[str, Stroke]:
    """Torch's methods in greys and blues, all others in warm colours; the same at every call."""
    found: dict[str, Stroke] = {}
    seen = {"t": 0, "g": 0}
    for name in dict.fromkeys(names):
        family, colours = ("t", 4) if name.startswith("torch") else ("g", 5)
        turn, colour = divmod(seen[family], colours)
        found[name] = Stroke(f"var(--{family}{colour})", ("", "7 3", "2 3", "9 3 2 3")[turn % 4])
        seen[family] += 1
    return found


def plain(names: Iterable[str]) -> dict[str, Stroke]:
    """A colour for each of names that are of no family; they repeat after nine."""
    distinct = dict.fromkeys(names)
    return {
        name: Stroke(f"var(--{PALETTE[place % len(PALETTE)]})")
        for place, name in enumerate(distinct)
    }


def element(tag: str, content: str = "", /, **attributes: object) -> str:
    """An element; `content` is SVG already, attributes are escaped, `_` in their names is `-`."""
    told = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for name, value in attributes.items()
        if value not in (None, "")
    )
    return f"<{tag}{told}>{content}</{tag}>" if content else f"<{tag}{told}/>"


def text(x: float, y: float, content: str, anchor: str = "start", soft: bool = False) -> str:
    """A line of text, escaped."""
    style = "soft" if soft else None
    return element("text", escape(content), x=x, y=y, text_anchor=anchor, class_=style)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A line of a class of `STYLE`."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def shortened(content: str, width: float) -> str:
    """`content`, or its beginning with an ellipsis if it is wider than `width` units."""
    most = max(2, int(width / _LETTER))
    return content if len(content) <= most else content[: most - 1] + "…"


def legend(entries: Sequence[tuple[str, str]], top: float) -> tuple[list[str], float]:
    """Entries (SVG of 22 units around the origin, label) in rows; and where the last row ends."""
    found, x, y = [], 0.0, top + 11
    for mark, label in entries:
        label = shortened(label, WIDTH - 30)
        wide = 28 + _LETTER * len(label) + 12
        if x and x + wide > WIDTH:
            x, y = 0.0, y + 16
        found.append(element("g", mark, transform=f"translate({_number(x)} {_number(y - 4)})"))
        found.append(text(x + 28, y, label))
        x += wide
    return found, y + 8 if entries else top


def bottom_axis(
    scale: Scale,
    top: float,
    bottom: float,
    label: str,
    ticks: Sequence[float] = (),
) -> list[str]:
    """Grid lines, their values and the axis's label below a plot."""
    found = []
    for value in ticks or scale.ticks():
        told, at = short(value), scale(value)
        found.append(line(at, top, at, bottom, "grid"))
        half = _LETTER * len(told) / 2
        anchor = "start" if at < half else "end" if at + half > WIDTH else "middle"
        found.append(text(at, bottom + 15, told, anchor, soft=True))
    found.append(line(scale.start, bottom, scale.end, bottom, "axis"))
    found.append(text(scale.end, bottom + 31, label, "end"))
    return found


def figure(parts: Iterable[str], height: float, title: str) -> str:
    """The figure as an element for a page; `title` is read to those who do not see it."""
    return element(
        "svg",
        element("title", escape(title)) + "".join(parts),
        class_="figure",
        viewBox=f"0 0 {_number(WIDTH)} {_number(height)}",
        role="img",
        xmlns="http://www.w3.org/2000/svg",
    )


def alone(drawn: str, heading: str) -> str:
    """A figure as a file of its own below a line of text, on a ground that reads on any page."""
    box = re.search(r'viewBox="0 0 (\S+) (\S+)"', drawn)
    assert box is not None
    width, height = float(box[1]) + 24, float(box[2]) + 46
    ground = (
        element("style", STYLE) + '<rect width="100%" height="100%" rx="6" fill="var(--card)"/>'
    )
    said = element("svg", text(12, 22, shortened(heading, WIDTH)), class_="figure")
    inner = drawn.replace("<svg ", f'<svg x="12" y="34" width="{box[1]}" height="{box[2]}" ', 1)
    return element(
        "svg",
        ground + said + inner,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        width=_number(1.6 * width),
        height=_number(1.6 * height),
    )


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
