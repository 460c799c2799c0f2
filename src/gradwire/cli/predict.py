"""`gradwire sim`: predictions, and their comparison with the lab."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.options import Json, Net, finite, names, writable
from gradwire.cli.output import output


def sim(
    ranks: Annotated[int, typer.Option(help="Number of ranks, to thousands.")] = 4,
    net: Net = "1gbit,1ms",
    codec_name: Annotated[
        str, typer.Option("--codec", help="NAME or NAME:OPTION=VALUE:..., comma-separated.")
    ] = "qsgd",
    algorithm: Annotated[str, typer.Option("--algorithm", help="Comma-separated.")] = "sra",
    model: Annotated[
        str, typer.Option("--model", help="resnet50, bert-large, ... or SIZES: 1e6,4096x1024.")
    ] = "resnet50",
    sweep: Annotated[
        str | None, typer.Option("--sweep", help="Such as ranks=2,4,8 or rate=1gbit,10gbit.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="A FILE.png or FILE.svg.")] = None,
    per_node: Annotated[int, typer.Option(help="Ranks per machine; they share its link.")] = 1,
    cores: Annotated[
        float | None,
        typer.Option(help="That all ranks share; each has its own unless given.", callback=finite),
    ] = None,
    backward: Annotated[
        float,
        typer.Option(
            help="Seconds in which gradients become ready, one after the other.", callback=finite
        ),
    ] = 0.0,
    segments: Annotated[int | None, typer.Option(help="Pipeline units a chunk.")] = None,
    partitions: Annotated[int | None, typer.Option(help="Of parameter_server.")] = None,
    coordinated: Annotated[bool, typer.Option("--coordinated", help="Send in rounds.")] = False,
    threads: Annotated[int, typer.Option(help="Threads per kernel.")] = 1,
    curves: Annotated[
        Path | None, typer.Option("--curves", help="What kernels cost; written if missing.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure kernels anew.")] = False,
    validate: Annotated[
        bool, typer.Option("--validate", help="Compare with the lab, at its own points.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Validate fewer points.")] = False,
    json_file: Json = None,
) -> None:
    """Predict what a step's collectives take, on simulated networks."""
    from gradwire.bench import simulate
    from gradwire.bench import validate as validation

    with output(json_file) as out:
        if validate:
            points = validation.QUICK if quick else {}
            columns = ["ranks", "net", "method", "algorithm", "measured_seconds"]
            out.measured(
                lambda advance: validation.run(**points, fresh=fresh, advance=advance),
                [*columns, "simulated_seconds", "error"],
            )
            return
        draw = None if plot is None else simulate.plotter(plot)
        writable("--plot", plot)
        if curves is not None and (fresh or not curves.exists()):
            writable("--curves", curves)
        options = {"segments": segments, "partitions": partitions, "coordinated": coordinated}
        wanted = simulate.Wanted(
            codecs=names("--codec", codec_name) or [],
            algorithms=names("--algorithm", algorithm) or [],
            ranks=ranks,
            net=net,
            model=model,
            per_node=per_node,
            cores=cores,
            backward=backward,
            options=options,
            sweep=sweep,
            threads=threads,
            file=curves,
            fresh=fresh,
        )
        columns = ["codec", "algorithm", "ranks", "seconds", "wire_bytes", "of_limit", "exact"]
        rows = out.measured(
            lambda advance: simulate.run(wanted, advance),
            [*(["value"] if sweep else []), *columns],
        )
        if draw is not None:
            draw(rows)
