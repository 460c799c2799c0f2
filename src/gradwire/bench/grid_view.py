"""The table of `gradwire bench grid`: a row per form of weights, a column per form of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from gradwire.bench.grids import Grid
from gradwire.bench.report.quantities import DASH, digits, network, seconds, size

Row = dict[str, Any]


def table(grid: Grid, rows: Sequence[Row]) -> Table:
    """The cells of a grid, from the rows of its run: last losses with their difference to fp32's;
    or median times of a step."""
    summaries = {row["method"]: row for row in rows if row["row"] == "summary"}
    first = next(iter(summaries.values()))
    made = Table(
        title=f"{_what(grid)}; {first['task']}, {first['ranks']} ranks, {network(first['net'])}",
        caption=_beside(grid, summaries),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        min_width=72,
    )
    made.add_column("weights", style="bold")
    for column in grid.columns:
        made.add_column(f"gradients {column}", justify="right")
    full = summaries.get(grid.baselines[0]) if grid.baselines else None
    for label in grid.rows:
        methods = [grid.cells.get((label, column)) for column in grid.columns]
        made.add_row(label, *(_cell(grid, summaries.get(str(m)), full) for m in methods))
    return made


def _what(grid: Grid) -> str:
    shown = "step" if grid.shows == "step_seconds" else "last loss"
    return f"{shown} by {grid.title}"


def _cell(grid: Grid, row: Row | None, full: Row | None) -> str:
    """A method's figure, and what it sends per step; a dash where the grid has none."""
    if row is None:
        return DASH
    if grid.shows == "step_seconds":
        return f"{seconds(row['step_seconds'])}\n{size(row['wire_bytes_per_step'])}"
    loss = row["final_loss"]
    told = digits(loss, 4)
    if loss is not None and full is not None and full["final_loss"]:
        told += f"\n{(loss / full['final_loss'] - 1) * 100:+.2f} %"
    return told


def _beside(grid: Grid, summaries: dict[str, Row]) -> str:
    """The baselines' figures in words."""
    if grid.shows == "step_seconds":
        ideal = [row["ideal_step_seconds"] for row in summaries.values()]
        known = [one for one in ideal if one is not None]
        least = seconds(min(known)) if known else DASH
        return f"below each: bytes per rank and step; a step without communication: {least}"
    losses = [f"{name} {digits(summaries[name]['final_loss'], 4)}" for name in grid.baselines]
    return f"below each: against {grid.baselines[0]}; {', '.join(losses)}"
