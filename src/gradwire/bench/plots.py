"""The report's plots, as SVG that takes its text colour from the page around it.

Matplotlib draws text and axes in a marker colour that is then replaced by `currentColor`, and text
stays text, so a plot reads well on a light and on a dark page and can be searched and copied.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")  # no display is needed, whatever the user's settings say

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradwire.bench.baselines import FULL

Row = dict[str, Any]

_MARKER = "#010203"
# Mid-tones that stand out on white and on near-black; torch's methods cool, gradwire's warm.
_TORCH = ("#7f8c9b", "#3b8fd4", "#17a2a2", "#8f77d8")
_GRADWIRE = ("#e8590c", "#d6336c", "#c99000", "#2f9e44", "#a0522d")
_NO_METADATA: Any = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _MARKER,
    "axes.labelcolor": _MARKER,
    "axes.edgecolor": _MARKER,
    "xtick.color": _MARKER,
    "ytick.color": _MARKER,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _MARKER,
    "grid.alpha": 0.12,
    "legend.frameon": False,
}


def curves(evaluations: Sequence[Row], target: float | None) -> str:
    """Loss against seconds and against steps, a line per method; seeds as thin lines.

    The first evaluation, before any training, is the same for all and far above the rest, so the
    axis starts below it.
    """
    names = _in_order(evaluations)
    colours = method_colours(names)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        by_time, by_step = figure.subplots(1, 2, sharey=True)
        for name in names:
            for seed in _values(evaluations, "seed", name):
                line = [
                    row
                    for row in evaluations
                    if row["method"] == name and row["seed"] == seed and row["loss"] is not None
                ]
                first = seed == evaluations[0]["seed"]
                # The baseline lies under 16 bit's line on every plot against steps: wide and pale.
                under = name == FULL
                style: dict[str, Any] = {
                    "color": colours[name],
                    "alpha": 0.6 if under else 1.0,
                    "linewidth": (4.5 if under else 2.2) if first else 1.0,
                    "marker": "o",
                    "markersize": 3.2 if first else 1.8,
                    "label": name if first else None,
                }
                losses = [row["loss"] for row in line]
                by_time.plot([row["seconds"] for row in line], losses, **style)
                by_step.plot([row["step"] for row in line], losses, **style)
        if target is not None:
            for axes in (by_time, by_step):
                axes.axhline(target, color=_MARKER, linewidth=1, linestyle="--", alpha=0.6)
            by_step.annotate(  # at the left, below all curves
                f"target {target:.3g}",
                (0.02, target),
                xycoords=("axes fraction", "data"),
                xytext=(0, 4),
                textcoords="offset points",
            )
        trained = [r["loss"] for r in evaluations if r["step"] > 0 and r["loss"] is not None]
        if trained:
            low, high = min(trained), max(trained)
            margin = 0.08 * (high - low) or 0.1
            by_time.set_ylim(low - margin, high + margin)
        by_time.set_xlabel("training time, s")
        by_time.set_xlim(left=0)
        by_step.set_xlabel("step")
        by_step.set_xlim(left=0)
        by_time.set_ylabel("validation loss, nats")
        by_time.legend(loc="upper right")
        return _svg(figure)


def step_times(summaries: Sequence[Row]) -> str:
    """Median step times, split into the ideal step and the rest."""
    measured = [row for row in summaries if row["step_seconds"] is not None]
    names = [row["method"] for row in measured]
    colours = method_colours(names)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _horizontal(len(measured))
        for place, row in enumerate(measured):
            ideal = min(row["ideal_step_seconds"] or 0.0, row["step_seconds"])
            colour = colours[row["method"]]
            rest = row["step_seconds"] - ideal
            axes.barh(place, ideal * 1e3, color=colour, alpha=0.4, height=0.62)
            axes.barh(place, rest * 1e3, left=ideal * 1e3, color=colour, height=0.62)
            axes.annotate(
                f"{row['step_seconds'] * 1e3:.0f} ms",
                (row["step_seconds"] * 1e3, place),
                xytext=(4, 0),
                textcoords="offset points",
                verticalalignment="center",
            )
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel("ms a step (pale: computing alone)")
        axes.margins(x=0.12)
        return _svg(figure)


def against_limit(
    labels: Sequence[str], values: Sequence[float], limits: Sequence[float | None]
) -> str:
    """Bars of seconds, each with a tick at its limit, where there is one."""
    colours = method_colours(labels)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _horizontal(len(labels))
        for place, (label, value, limit) in enumerate(zip(labels, values, limits, strict=True)):
            axes.barh(place, value * 1e3, color=colours[label], height=0.62)
            if limit is not None:
                tick = [place - 0.42, place + 0.42]
                axes.plot([limit * 1e3] * 2, tick, color=_MARKER, linewidth=2)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_xlabel("ms")
        return _svg(figure)


def bars(labels: Sequence[str], values: Sequence[float], unit: str) -> str:
    """Plain bars, from the top down."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _horizontal(len(labels))
        axes.barh(range(len(labels)), values, color=_GRADWIRE[0], height=0.62)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_xlabel(unit)
        return _svg(figure)


def method_colours(names: Sequence[str]) -> dict[str, str]:
    """A colour per method, the same on every plot with these methods."""
    colours: dict[str, str] = {}
    for family, palette in ((True, _TORCH), (False, _GRADWIRE)):
        members = [name for name in dict.fromkeys(names) if name.startswith("torch") == family]
        for place, name in enumerate(members):
            colours[name] = palette[place % len(palette)]
    return colours


def _horizontal(count: int) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(10, 0.9 + 0.36 * count), layout="constrained")
    axes = figure.subplots()
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure, axes


def _in_order(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _values(rows: Sequence[Row], key: str, method: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows if row["method"] == method))


def _svg(figure: Figure) -> str:
    """The figure as an SVG element to be placed into HTML; the same figure, the same text."""
    # Element ids must differ between the plots of one page: so they are salted by what it shows.
    drawn = hashlib.sha256(repr([axes.dataLim.bounds for axes in figure.axes]).encode()).hexdigest()
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": drawn}):
        figure.savefig(stream, format="svg", transparent=True, metadata=_NO_METADATA)
    text = stream.getvalue()
    return text[text.index("<svg") :].replace(_MARKER, "currentColor")
