"""The grids of `gradwire bench grid`: runs of `bench train --sharded` over weights x gradients.

| grid | weights | gradients | of |
| --- | --- | --- | --- |
| bits | 6, 5, 4 bits | 6, 5, 4 bits | THESIS Table 5.2, and what Table 5.3 has of uniform levels |
| low | 3, 2 bits, or 8 | uncompressed, or 3, 2 bits | THESIS Table C.3, uniform levels |
| learned | 6 to 2 bits, or 8 | 4 bits, uncompressed, 3, 2 | Tables 5.3 and C.3, learned levels |
| blocks | blocks of 1024, 16384 | the same, both in 8 bits | THESIS C.4, Fig. C.4 |
| fake | ratios 1, 2, 4, 8 | the same | THESIS Table C.2: times alone |

Weights are quantised by RandomShift, gradients by QSGD (`qsdp`); both by LearnedLevels in the grid
`learned`, which has the tables' cells, but for weights of 8 bits, which stay uniform.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.table import Column, Table

from gradwire.errors import ConfigError, use_one_of
from gradwire_tools.bench.quantities import DASH, digits, network, seconds, size
from gradwire_tools.bench.rows import Row
from gradwire_tools.bench.train import config as training
from gradwire_tools.bench.train.config import TrainConfig

Cells = Mapping[tuple[str, str], str]

_BASELINES = ("fsdp-fp32", "fsdp-mixed")  # for the loss; and the thesis'


@dataclass(frozen=True)
class Grid:
    """A grid.

    Attributes:
        title: what its cells vary.
        cells: (row's label, column's label) -> method; rows are of weights, columns of gradients,
            in order. Not every combination need be there.
        baselines: methods beside it.
        shows: the summary's key in the cells: "final_loss" or "step_seconds".
    """

    title: str
    cells: Cells
    baselines: tuple[str, ...] = _BASELINES
    shows: str = "final_loss"

    @property
    def rows(self) -> list[str]:
        """Labels of weights."""
        return list(dict.fromkeys(row for row, _ in self.cells))

    @property
    def columns(self) -> list[str]:
        """Labels of gradients."""
        return list(dict.fromkeys(column for _, column in self.cells))

    @property
    def methods(self) -> tuple[str, ...]:
        """All that are trained."""
        return (*self.baselines, *self.cells.values())

    def quick(self) -> Grid:
        """Its first and last row and column, beside the first baseline: few enough for --quick."""
        rows, columns = self.rows, self.columns
        ends = {(r, c) for r in (rows[0], rows[-1]) for c in (columns[0], columns[-1])}
        cells = {place: method for place, method in self.cells.items() if place in ends}
        return replace(self, cells=cells, baselines=self.baselines[:1])


def _product(labels: tuple[str, ...], method: str) -> Cells:
    """Every pair of labels; `method` has {w} and {g}."""
    return {(w, g): method.format(w=w, g=g) for w in labels for g in labels}


_LOW = {
    ("3", "32"): "gradwire:w=randomshift:bits=3",
    ("2", "32"): "gradwire:w=randomshift:bits=2",
    ("8", "3"): "qsdp:w=8:g=3",
    ("8", "2"): "qsdp:w=8:g=2",
}
_LEARNED = {
    **{(w, "4"): f"qsdp:w={w}:g=4:learned" for w in "654"},
    **{(w, "32"): f"gradwire:w=learnedlevels:bits={w}:learned" for w in "432"},
    **{
        ("8", g): f"gradwire:w=randomshift:bits=8:g=learnedlevels:rounding=stochastic:bits={g}"
        ":learned"
        for g in "32"
    },
}
GRIDS: dict[str, Grid] = {
    "bits": Grid("bits per value", _product(("6", "5", "4"), "qsdp:w={w}:g={g}")),
    "low": Grid("bits per value", _LOW),
    "learned": Grid("bits per value, learned levels", _LEARNED),
    "blocks": Grid(
        "values per block, in 8 bits",
        _product(("1024", "16384"), "qsdp:w=8:block={w}:g=8:block={g}"),
    ),
    "fake": Grid(
        "ratio of fake compression",
        _product(("1", "2", "4", "8"), "truncate:w={w}:g={g}"),
        baselines=(),
        shows="step_seconds",
    ),
}


def plan(name: str, quick: bool = False, **given: Any) -> tuple[Grid, TrainConfig]:
    """The grid with this name, and the configuration of its run.

    Args:
        quick: as of `config.plan`, and for a part of the grid.
        given: further arguments of `config.plan`.

    Raises:
        ConfigError: there is none with this name, or as `config.plan`.
    """
    if name not in GRIDS:
        raise ConfigError(f"--grid {name}: {use_one_of(name, GRIDS)}")
    grid = GRIDS[name].quick() if quick else GRIDS[name]
    return grid, training.plan(methods=grid.methods, sharded=True, quick=quick, **given)


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
