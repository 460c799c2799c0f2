"""`gradwire demo` and `gradwire report`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from gradwire.errors import ConfigError
from gradwire_tools.cli import options
from gradwire_tools.cli.options import Text, writable
from gradwire_tools.cli.output import output

Page = Annotated[Path, Option("--output", "-o", help="The HTML page.")]


def demo(
    page: Page = Path("report.html"),
    net: Annotated[Text, Option(help="Instead of one chosen here.")] = None,
    json_file: options.Json = None,
) -> None:
    """Train a GPT over a slow emulated network, with and without gradwire (3 minutes)."""
    from gradwire_tools import demo as demonstration

    writable("--output", page)
    with output(json_file) as out:
        demonstration.demo(page, out.row, out.console, net)


def report(
    context: typer.Context,
    files: Annotated[list[Path], Argument(help="Rows that --json FILE wrote.")],
    page: Page = Path("report.html"),
    svg: Annotated[
        Path | None, Option(metavar="FILE", help="Only a figure: losses, or gains by network.")
    ] = None,
    table: Annotated[bool, Option("--table", help="Only print tables, in Markdown.")] = False,
    gains: Annotated[bool, Option("--gains", help="Of --table: methods x networks.")] = False,
    best: Annotated[bool, Option("--best", help="The best methods by network.")] = False,
    steps: Annotated[bool, Option("--steps", help="Step times, methods x networks.")] = False,
    choices: Annotated[bool, Option("--choices", help="Of the planner, by network.")] = False,
    parts: Annotated[bool, Option("--parts", help="Of the ablation, by model.")] = False,
    auto: Annotated[bool, Option("--auto", help="Of automatic mode, by network.")] = False,
    task: Annotated[Text, Option(help="Of --table: only this task.")] = None,
) -> None:
    """Make one self-contained HTML page with figures from benchmark rows."""
    from gradwire_tools import report as reports

    flags = {"gains": gains, "best": best, "steps": steps, "choices": choices, "parts": parts}
    kinds = [name for name, given in {**flags, "auto": auto}.items() if given]
    if table:
        for name, option in (("svg", "--svg"), ("page", "--output")):
            if "DEFAULT" not in str(context.get_parameter_source(name)):
                raise ConfigError(f"--table and {option} are both given: leave one of them out")
        typer.echo(reports.table(files, kinds, task))
        return
    for name in (*kinds, *(["task"] if task is not None else [])):
        raise ConfigError(f"--{name}: is for a table: give --table")
    option, target = ("--output", page) if svg is None else ("--svg", svg)
    writable(option, target)
    if os.path.realpath(target) in map(os.path.realpath, files):
        raise ConfigError(f"{option} {target} is one of the files that rows are read from")
    (reports.write if svg is None else reports.picture)(files, target)
    typer.echo(f"wrote {target}")
