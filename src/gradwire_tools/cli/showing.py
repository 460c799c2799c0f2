"""`gradwire demo` and `gradwire report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradwire_tools.cli.options import Json, writable
from gradwire_tools.cli.output import output

Page = Annotated[Path, typer.Option("--output", help="The HTML page.")]


def demo(
    page: Page = Path("report.html"),
    net: Annotated[str | None, typer.Option("--net", help="Instead of one chosen here.")] = None,
    json_file: Json = None,
) -> None:
    """Train a GPT over a slow emulated network, with and without gradwire (3 minutes)."""
    from gradwire_tools import demo as demonstration

    writable("--output", page)
    with output(json_file) as out:
        demonstration.demo(page, out.row, out.console, net)


def report(
    files: Annotated[list[Path], typer.Argument(help="Rows that --json FILE wrote.")],
    page: Page = Path("report.html"),
    svg: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE", help="Only a figure: losses, or gains by network."),
    ] = None,
) -> None:
    """Make one self-contained HTML page with figures from benchmark rows."""
    from gradwire_tools import report as reports

    target = page if svg is None else svg
    writable("--output" if svg is None else "--svg", target)
    if svg is None:
        reports.write(files, page)
    else:
        reports.picture(files, svg)
    typer.echo(f"wrote {target}")
