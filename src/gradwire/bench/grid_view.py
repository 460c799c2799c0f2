"""The table of `gradwire bench grid`: a row per form of weights, a column per form of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Column, Table

from gradwire.bench.grids import Grid
from gradwire.bench.report.quantities import DASH, digits, network, seconds, size

Row = dict[str, Any]


def table(grid: Grid, rows: Sequence[Row]) -> Table:
    """The cells of a grid, from the rows of its run: last losses with their difference to fp32's;
    or median times of a step, with the bytes that it sends."""
    summaries = {row["method"]: row for row in rows if row["row"] == "summary"}
    first = next(iter(summaries.values()))
    timed = grid.shows == "step_seconds"
    if timed:
        ideal = [row["ideal_step_seconds"] for row in summaries.values()]
        least = seconds(min((one for one in ideal if one is not None), default=None))
        beside = f"below each: bytes per rank and step; a step without communication: {least}"
    else:
        told = (f"{name} {digits(summaries[name]['final_loss'], 4)}" for name in grid.baselines)
        beside = f"below each: against {grid.baselines[0]}; {', '.join(told)}"
    made = Table(
        Column("weights", style="bold"),
        *(Column(f"gradients {column}", justify="right") for column in grid.columns),
        title=f"{'step' if timed else 'last loss'} by {grid.title}; {first['task']}, "
        f"{first['ranks']} ranks, {network(first['net'])}",
        caption=beside,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        min_width=72,
    )
    full = None if timed else summaries[grid.baselines[0]]["final_loss"]

    def cell(row: Row | None) -> str:
        if row is None:
            return DASH
        if timed:
            return f"{seconds(row['step_seconds'])}\n{size(row['wire_bytes_per_step'])}"
        loss = row["final_loss"]
        more = f"\n{(loss / full - 1) * 100:+.2f} %" if loss is not None and full else ""
        return digits(loss, 4) + more

    for label in grid.rows:
        methods = [grid.cells.get((label, column)) for column in grid.columns]
        made.add_row(label, *(cell(summaries.get(str(method))) for method in methods))
    return made
