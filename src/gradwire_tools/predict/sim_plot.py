"""The plot of `gradwire sim --plot`: seconds along the swept parameter, or bars without a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError
from gradwire_tools.predict.sim_sweep import place

Row = dict[str, Any]


def plotter(file: Path) -> Callable[[Sequence[Row]], None]:
    """A function that draws rows into `file`. Call it first, to find errors before simulating.

    Raises:
        ConfigError: `file` ends in neither .png nor .svg, or matplotlib is missing.
    """
    if file.suffix not in (".png", ".svg"):
        raise ConfigError(f"--plot {file}: give a name that ends in .png or .svg")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            '--plot needs matplotlib, which is not installed: pip install "gradwire[report]"'
        ) from error
    return partial(_draw, Figure(figsize=(8, 5), layout="constrained"), file)


def _draw(figure: Any, file: Path, rows: Sequence[Row]) -> None:
    """The limit of each row is a thin dotted line, or a tick; where it has none, nothing."""
    axes, first = figure.subplots(), rows[0]
    swept = first.get("sweep")
    if swept is None:
        _bars(axes, rows)
    else:
        _lines(axes, rows)
        axes.set_xlabel(swept)
    ranks = [] if swept == "ranks" else [f"{first['ranks']} ranks"]
    net = [] if swept in ("rate", "latency") else [str(first["net"])]
    axes.set_title(", ".join([first["model"], *ranks, *net]))
    figure.savefig(file, dpi=150)


def _lines(axes: Any, rows: Sequence[Row]) -> None:
    for number, name in enumerate(dict.fromkeys(map(_name, rows))):
        mine = [row for row in rows if _name(row) == name]
        places, colour = [_place(row) for row in mine], f"C{number % 10}"
        axes.plot(places, [row["seconds"] for row in mine], "o-", color=colour, label=name)
        axes.plot(places, [row["limit_seconds"] for row in mine], ":", color=colour, linewidth=1)
    labels = {_place(row): str(row["value"]) for row in rows}
    if all(isinstance(place, float) and place > 0 for place in labels):
        if max(labels) >= 8 * min(labels):
            axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(list(labels), list(labels.values()))
        axes.minorticks_off()
    axes.set_ylabel("seconds (dotted: the wire's limit)")
    axes.grid(alpha=0.3)
    axes.legend()


def _bars(axes: Any, rows: Sequence[Row]) -> None:
    names = [_name(row) for row in rows]
    axes.barh(names, [row["seconds"] for row in rows], height=0.6)
    axes.plot([row["limit_seconds"] for row in rows], names, "|", color="black", markersize=20)
    axes.invert_yaxis()
    axes.set_xlabel("seconds (tick: the wire's limit)")


def _name(row: Row) -> str:
    return f"{row['codec'] if 'codec' in row else row['method']}, {row['algorithm']}"


def _place(row: Row) -> Any:
    """A number, or what matplotlib puts into a category."""
    found = place(row)
    return row["value"] if found is None else found
