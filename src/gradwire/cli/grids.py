"""`gradwire bench grid`."""

from __future__ import annotations

from typing import Annotated

import typer

from gradwire.cli.options import Json, Quick, numbers
from gradwire.cli.output import output
from gradwire.cli.training import state_of, task_options


def bench_grid(
    grid_name: Annotated[
        str, typer.Option("--grid", help="bits, low, learned, blocks or fake.")
    ] = "bits",
    task: Annotated[
        str, typer.Option("--task", help="gpt, gpt-32k, image or image-resnet50.")
    ] = "gpt",
    task_option: Annotated[
        list[str] | None,
        typer.Option("--task-option", help="NAME=VALUE, such as layers=4; repeatable."),
    ] = None,
    net: Annotated[str | None, typer.Option("--net", help="RATE,LATENCY or none.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Emulated machines, one rank each.")] = None,
    seeds: Annotated[str, typer.Option(help="Such as 0,1,2.")] = "0",
    steps: Annotated[int | None, typer.Option(help="Training steps of each method.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a killed run of the same --json FILE.")
    ] = False,
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """Train under FSDP2 with every combination of a grid: weights x gradients."""
    from gradwire.bench import grid_view, grids, train_view

    with output(json_file) as out:
        grid, config = grids.plan(
            grid_name,
            quick=quick,
            task=task,
            task_options=task_options(task_option, "iid"),
            net=net,
            nodes=nodes,
            seeds=tuple(numbers("--seeds", seeds) or ()),
            steps=steps,
        )
        state = state_of(json_file, resume)
        rows = []
        for row in train_view.watch(config, out.remarks, state, resume):
            out.row(row)
            rows.append(row)
        out.console.print(grid_view.table(grid, rows))
