"""`gradwire doctor`, `gradwire codec` and `gradwire lab`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from gradwire.errors import ConfigError, of_file
from gradwire_tools.cli import options
from gradwire_tools.cli.options import Real, Text, Whole, command, names, number
from gradwire_tools.cli.output import output

codec = options.group(
    "codec",
    "The codecs and aggregators, and the stages of a codec's compilation.",
    "show qsgd:bits=2",
)
lab = options.group(
    "lab", "Emulated machines on slow links.", "run --nodes 2 --net 100mbit,1ms -- hostname"
)


def doctor(
    ranks: Annotated[
        Whole, Option(help="Measure a step with as many ranks; up to about a minute.")
    ] = None,
    net: options.Net = "none",
    numel: Annotated[Whole, Option(help="Values of the step's gradient; 5000000.")] = None,
    model: Annotated[
        Text, Option(help="Instead of --numel: resnet50, ... or SIZES: 1e6,4096x1024.")
    ] = None,
    compute: Annotated[
        Real, number("Seconds that your own step computes; else layers are computed here.")
    ] = None,
    quick: options.Quick = False,
    json_file: options.Json = None,
) -> None:
    """What is available here; with --ranks, whether compression pays.

    With --ranks, or under torchrun, links are measured, and a training step with torch's fp32 and
    fp16 and gradwire's bf16 and 4 bits. The verdict comes first, the line to write last; what is
    available here is then in --json alone. Under torchrun it joins the ranks that torchrun has
    started, so it measures the network between them.
    """
    from gradwire_tools.bench.network import network
    from gradwire_tools.doctor import examine

    wanted = network.plan(ranks, net, numel, model, compute, quick)
    if wanted is not None and wanted.world.joins and os.environ["RANK"] != "0":
        wanted.measured()  # rank 0 has the rows
        return
    with output(json_file) as out:
        if wanted is None:
            out.rows(examine(), ["part", "available", "detail"])
            return
        out.quiet(examine())
        rows = {row["part"]: row for row in out.quiet(network.run(wanted))}
        first, *rest = rows.pop("verdict")["detail"].splitlines()
        out.say(first)
        for part in ("network", "computing", "kernels"):
            out.say(f"{part}: {rows.pop(part)['detail']}")
        columns = ["method", "step_seconds", "compute_seconds", "communication_seconds"]
        out.table([*rows.values()], [*columns, "exposed_seconds"], framed=False)
        out.say("\n".join(rest))


@command(codec, "list", "")
def codec_list(json_file: options.Json = None) -> None:
    """The codecs and aggregators: operators, lines of code, options."""
    from gradwire import codecs
    from gradwire.aggregators import registry

    rows = [{**row, "kind": "codec"} for row in codecs.listing()]
    rows += [{**row, "kind": "aggregator"} for row in registry.listing()]
    with output(json_file) as out:
        out.rows(rows, ["codec", "kind", "operators", "lines", "options"])


@command(codec, "show", "qsgd:bits=2")
def codec_show(
    name: Annotated[str, Argument(help="NAME or NAME:OPTION=VALUE:..., such as qsgd:bits=2")],
    ir: Annotated[bool, Option("--ir", help="The intermediate representation.")] = False,
    c: Annotated[bool, Option("--c", help="The generated C.")] = False,
    triton: Annotated[bool, Option("--triton", help="The generated Triton.")] = False,
) -> None:
    """Print what one codec or aggregator is, with its options; or the stages of a codec."""
    from gradwire import codecs
    from gradwire.aggregators import registry
    from gradwire.codecs.text import parse
    from gradwire.lang import show
    from gradwire_tools.cli.methods import described

    wanted = [stage for stage, given in (("ir", ir), ("c", c), ("triton", triton)) if given]
    if not wanted:
        typer.echo(described(name))
        return
    if parse(name)[0] in registry.REGISTRY:
        raise ConfigError(
            f"{name!r} is an aggregator, which has no stages: name a codec of `gradwire codec list`"
        )
    chosen = codecs.get(name)
    for stage in wanted:
        typer.echo(show(chosen, stage))


@command(codec, "build", "--codec qsgd --isa x86-64-v3")
def codec_build(
    codec_name: Annotated[Text, Option("--codec", help="Comma-separated codecs, or shm.")] = None,
    isa: Annotated[Text, Option(help="Such as x86-64-v2,x86-64-v3; all unless given.")] = None,
    folder: Annotated[
        Path | None, Option("--output", "-o", help="Where this installation looks, unless given.")
    ] = None,
    jobs: Annotated[
        Whole, Option(min=1, help="Compilers to run in parallel; default: number of cores.")
    ] = None,
    json_file: options.Json = None,
) -> None:
    """Compile kernels ahead of time, for every level of instruction sets of this machine.

    Wheels carry what this makes. The compiler is gcc, or GRADWIRE_CC.
    """
    from gradwire import wheel
    from gradwire.lang.native import build, jit, prebuilt
    from gradwire_tools.bench.progress import progress

    with output(json_file) as out:
        try:
            levels = build.levels(names("--isa", isa))
            units = wheel.units(names("--codec", codec_name))
            place = folder or prebuilt.folder()
            built = build.build(units, levels, place, jobs, progress)
            out.measured(built, ["isa", "kernels", "seconds", "bytes", "file"])
        except (jit.CompileError, OSError) as error:
            raise ConfigError(f"nothing was built: {of_file(error)}") from error


@command(codec, "cache", "--clear")
def codec_cache(
    clear: Annotated[
        bool, Option("--clear", help="Remove them: they are compiled anew on next use.")
    ] = False,
    json_file: options.Json = None,
) -> None:
    """The kernels that were compiled on first use: where they are kept, and how large they are.

    Kernels that came with the installation are not among them, nor are the caches of Triton.
    """
    from gradwire.lang.native import cache

    found = cache.files()
    row = {
        "folder": str(cache.folder()),
        "files": len(found),
        "bytes": sum(path.stat().st_size for path in found),
        "removed": clear,
    }
    with output(json_file) as out:
        for path in found if clear else ():
            path.unlink(missing_ok=True)  # a process that runs keeps what it has loaded
        out.rows([row], [*row])


@command(
    lab,
    "run",
    "--nodes 2 --net 100mbit,1ms -- python train.py",
    context_settings={"allow_interspersed_args": False},
)
def lab_run(
    command: Annotated[list[str], Argument(metavar="CMD", help="The command, after --.")],
    nodes: Annotated[int, Option(help="Number of emulated machines.")] = 4,
    net: Annotated[str, Option(help=options.SCHEDULED)] = "1gbit,1ms",
    timeout: Annotated[Real, number("Seconds until all are stopped.")] = None,
    length: Annotated[Real, number("Of the run in seconds, for a schedule by share.")] = None,
) -> None:
    """Run a command on every node.

    Each node gets torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, ...).
    """
    from gradwire_tools.lab import Schedule, run_command

    if length is not None and Schedule.parse(net).unit != "share":
        raise ConfigError(f"--length {length:g}: is for a schedule by share: leave it out")
    raise typer.Exit(run_command(command, nodes, net, length, timeout=timeout))
