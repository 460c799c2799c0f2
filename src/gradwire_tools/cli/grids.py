"""`gradwire bench grid`."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from gradwire_tools.cli import options
from gradwire_tools.cli.options import Text, numbers
from gradwire_tools.cli.output import output
from gradwire_tools.cli.training import task_options, trained


def bench_grid(
    grid_name: Annotated[
        str, Option("--grid", help="bits, low, learned, blocks or fake.")
    ] = "bits",
    task: options.Task = "gpt",
    task_option: options.TaskOption = None,
    net: Annotated[Text, Option(help="RATE,LATENCY or none.")] = None,
    nodes: options.Nodes = None,
    seeds: options.Seeds = "0",
    steps: options.Steps = None,
    resume: options.Resume = False,
    quick: options.Quick = False,
    json_file: options.Json = None,
) -> None:
    """Train under FSDP2 with every combination of a grid: weights x gradients."""
    from gradwire_tools.bench.paper import grids

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
        out.console.print(grids.table(grid, trained(config, out, json_file, resume)))
