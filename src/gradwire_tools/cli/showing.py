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
    files: Annotated[list[Path], Argument(help="Rows that --json FILE wrote.")],
    page: Page = Path("report.html"),
    svg: Annotated[
        Path | None, Option(metavar="FILE", help="Only a figure: losses, or gains by network.")
    ] = None,
) -> None:
    """Make one self-contained HTML page with figures from benchmark rows."""
    from gradwire_tools import report as reports

    option, target = ("--output", page) if svg is None else ("--svg", svg)
    writable(option, target)
    if os.path.realpath(target) in map(os.path.realpath, files):
        raise ConfigError(f"{option} {target} is one of the files that rows are read from")
    (reports.write if svg is None else reports.picture)(files, target)
    typer.echo(f"wrote {target}")
