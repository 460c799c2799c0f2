"""The plot of `gradwire sim --plot`: seconds along the swept parameter, or bars without a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")  # no display is needed, whatever the user's settings say

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradwire.lab import Network

Row = dict[str, Any]


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw rows of bench.simulate; the limit of each is a thin dotted line, or a tick."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    first = rows[0]
    if "sweep" in first:
        _lines(axes, rows)
    else:
        _bars(axes, rows)
    where = [f"{first['model']}"]
    if first.get("sweep") != "ranks":
        where.append(f"{first['ranks']} ranks")
    if first.get("sweep") not in ("rate", "latency"):
        where.append(str(first["net"]))
    axes.set_title(", ".join(where))
    figure.savefig(file, dpi=150)


def _lines(axes: Axes, rows: Sequence[Row]) -> None:
    for number, name in enumerate(dict.fromkeys(map(_name, rows))):
        mine = [row for row in rows if _name(row) == name]
        places = [_place(row) for row in mine]
        colour = f"C{number % 10}"
        axes.plot(places, [row["seconds"] for row in mine], "o-", color=colour, label=name)
        if all(row["limit_seconds"] is not None for row in mine):
            limits = [row["limit_seconds"] for row in mine]
            axes.plot(places, limits, ":", color=colour, linewidth=1)
    places = [_place(row) for row in rows]
    if all(isinstance(place, int | float) and place > 0 for place in places):
        if max(places) >= 8 * min(places):
            axes.set_xscale("log", base=2 if rows[0]["sweep"] == "ranks" else 10)
        axes.set_yscale("log")
        axes.set_xticks(sorted(set(places)), [_label(row) for row in _by_place(rows)])
        axes.minorticks_off()
    axes.set_xlabel(rows[0]["sweep"])
    axes.set_ylabel("seconds (dotted: the wire's limit)")
    axes.grid(alpha=0.3)
    axes.legend()


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    names = [_name(row) for row in rows]
    axes.barh(range(len(rows)), [row["seconds"] for row in rows], height=0.6)
    for place, row in enumerate(rows):
        if row["limit_seconds"] is not None:
            tick = [place - 0.4, place + 0.4]
            axes.plot([row["limit_seconds"]] * 2, tick, color="black")
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds (tick: the wire's limit)")


def _name(row: Row) -> str:
    return f"{row['codec'] if 'codec' in row else row['method']}, {row['algorithm']}"


def _place(row: Row) -> Any:
    """Where a row stands along the sweep."""
    if row["sweep"] in ("rate", "latency"):
        network = Network.parse(row["net"], emulated=False)
        return network.rate_bits_per_s if row["sweep"] == "rate" else network.latency_s
    return row["value"]


def _label(row: Row) -> str:
    return str(row["value"])


def _by_place(rows: Sequence[Row]) -> list[Row]:
    """One row of each place, in order."""
    return [row for _, row in sorted({_place(row): row for row in rows}.items())]
