"""The plot of `gradwire sim --plot`: seconds along the swept parameter, or bars without a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")  # no display is needed, whatever the user's settings say

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradwire_tools.predict.sim_sweep import place

Row = dict[str, Any]


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw rows of bench.simulate; the limit of each is a thin dotted line, or a tick."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    first = rows[0]
    swept = first.get("sweep")
    if swept is None:
        _bars(axes, rows)
    else:
        _lines(axes, rows, swept)
    ranks = [] if swept == "ranks" else [f"{first['ranks']} ranks"]
    net = [] if swept in ("rate", "latency") else [str(first["net"])]
    axes.set_title(", ".join([first["model"], *ranks, *net]))
    figure.savefig(file, dpi=150)


def _lines(axes: Axes, rows: Sequence[Row], swept: str) -> None:
    for number, name in enumerate(dict.fromkeys(map(_name, rows))):
        mine = [row for row in rows if _name(row) == name]
        places, colour = [_place(row) for row in mine], f"C{number % 10}"
        axes.plot(places, [row["seconds"] for row in mine], "o-", color=colour, label=name)
        if all(row["limit_seconds"] is not None for row in mine):
            limits = [row["limit_seconds"] for row in mine]
            axes.plot(places, limits, ":", color=colour, linewidth=1)
    labels = {_place(row): str(row["value"]) for row in rows}
    if all(isinstance(place, float) and place > 0 for place in labels):
        if max(labels) >= 8 * min(labels):
            axes.set_xscale("log", base=2 if swept == "ranks" else 10)
        axes.set_yscale("log")
        axes.set_xticks(list(labels), list(labels.values()))
        axes.minorticks_off()
    axes.set_xlabel(swept)
    axes.set_ylabel("seconds (dotted: the wire's limit)")
    axes.grid(alpha=0.3)
    axes.legend()


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    axes.barh(range(len(rows)), [row["seconds"] for row in rows], height=0.6)
    for at, row in enumerate(rows):
        if row["limit_seconds"] is not None:
            axes.plot([row["limit_seconds"]] * 2, [at - 0.4, at + 0.4], color="black")
    axes.set_yticks(range(len(rows)), [_name(row) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("seconds (tick: the wire's limit)")


def _name(row: Row) -> str:
    return f"{row['codec'] if 'codec' in row else row['method']}, {row['algorithm']}"


def _place(row: Row) -> Any:
    """A number, or what matplotlib puts into a category."""
    found = place(row)
    return row["value"] if found is None else found
