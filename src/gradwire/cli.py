"""The command line: thin verbs over the library. `gradwire --help` lists them.

With --json FILE a verb writes one JSON object a line to FILE; with --json - they go to standard
output, and nothing else does. Tables, progress and remarks are for people and go to standard
error then.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.table import Table

from gradwire.errors import ConfigError, GradwireError

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
bench = typer.Typer(help="Measure kernels, collectives and training.", no_args_is_help=True)
codec = typer.Typer(help="The codecs, and every stage of their compilation.", no_args_is_help=True)
lab = typer.Typer(help="Emulated machines on slow links.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(codec, name="codec")
app.add_typer(lab, name="lab")

Row = dict[str, Any]
Json = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="JSON lines to FILE; - is stdout.")
]
Quick = Annotated[bool, typer.Option("--quick", help="End within 45 seconds on two cores.")]
Net = Annotated[str, typer.Option("--net", help="RATE,LATENCY such as 1gbit,1ms; or none.")]


class Output:
    """Where a verb's rows and remarks go."""

    def __init__(self, stream: TextIO | None, console: Console) -> None:
        self.stream = stream
        self.console = console

    def row(self, row: Row) -> None:
        if self.stream is not None:
            self.stream.write(json.dumps(row) + "\n")
            self.stream.flush()

    def rows(self, rows: Iterable[Row], columns: list[str]) -> list[Row]:
        """Write each row as it comes; at the end print a table of `columns` for people."""
        kept = []
        for row in rows:
            self.row(row)
            kept.append(row)
        self.table(kept, columns)
        return kept

    def table(self, rows: list[Row], columns: list[str]) -> None:
        table = Table(*columns)
        for row in rows:
            table.add_row(*(_text(row.get(column)) for column in columns))
        self.console.print(table)


@contextmanager
def output(destination: str | None) -> Iterator[Output]:
    """An Output for --json's argument; the file is closed at the end."""
    people = Console(stderr=destination == "-")
    if destination in (None, "-"):
        yield Output(sys.stdout if destination == "-" else None, people)
    else:
        file = Path(str(destination))
        if file.is_dir() or not file.parent.is_dir():
            raise ConfigError(f"--json {file}: not a file in an existing folder")
        with file.open("w") as stream:
            yield Output(stream, people)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name}={_text(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return "-" if value is None else str(value)


def _numbers(option: str, text: str | None) -> list[int]:
    """The whole numbers of an option that takes several."""
    numbers = []
    for part in _list(text) or []:
        try:
            numbers.append(int(part))
        except ValueError:
            raise ConfigError(f"{option} {text}: {part!r} is not a whole number") from None
    return numbers


def _list(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


@app.command()
def doctor(json_file: Json = None) -> None:
    """What is available here, and what is not and why."""
    from gradwire.doctor import examine

    with output(json_file) as out:
        out.rows(examine(), ["part", "available", "detail"])


@codec.command("list")
def codec_list(json_file: Json = None) -> None:
    """The codecs: operators, lines of encode and decode, options."""
    from gradwire.codecs import listing

    with output(json_file) as out:
        out.rows(listing(), ["codec", "operators", "lines", "options"])


@codec.command("show")
def codec_show(
    name: Annotated[str, typer.Argument(help="NAME or NAME:OPTION=VALUE:..., such as qsgd:bits=2")],
    ir: Annotated[bool, typer.Option("--ir", help="The intermediate representation.")] = False,
    c: Annotated[bool, typer.Option("--c", help="The generated C.")] = False,
    triton: Annotated[bool, typer.Option("--triton", help="The generated Triton.")] = False,
) -> None:
    """Print the stages of one codec (IR and C, unless some are chosen)."""
    from gradwire import codecs
    from gradwire.bench import methods
    from gradwire.lang import show

    options: dict[str, Any] = dict(methods.parse(f"gradwire:{name}").options)
    chosen = codecs.get(**options)
    wanted = {"ir": ir, "c": c, "triton": triton}
    for stage in [stage for stage, given in wanted.items() if given] or ["ir", "c"]:
        typer.echo(show(chosen, stage))


@codec.command("build")
def codec_build(
    codec_name: Annotated[
        str | None, typer.Option("--codec", help="NAME or NAME:OPTION=VALUE:..., or shm; commas.")
    ] = None,
    isa: Annotated[
        str | None, typer.Option("--isa", help="Such as x86-64-v2,x86-64-v3; all unless given.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--output", help="Where this installation looks, unless given.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at once; the cores.")] = None,
    json_file: Json = None,
) -> None:
    """Compile kernels ahead of time, for every level of instruction sets of this machine.

    Wheels carry what this makes. The compiler is gcc, or GRADWIRE_CC.
    """
    from gradwire import wheel
    from gradwire.lang import build, jit, prebuilt

    with output(json_file) as out:
        try:
            levels = build.levels(_list(isa))
            units = wheel.units(_list(codec_name))
            rows = build.build(units, levels, folder or prebuilt.folder(), jobs)
            out.rows(rows, ["isa", "kernels", "seconds", "bytes", "file"])
        except (jit.CompileError, OSError) as error:
            raise ConfigError(f"nothing was built: {error}") from error


@lab.command("run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab_run(
    context: typer.Context,
    nodes: Annotated[int, typer.Option(help="Number of emulated machines.")] = 4,
    net: Net = "1gbit,1ms",
    timeout: Annotated[float | None, typer.Option(help="Seconds until all are stopped.")] = None,
) -> None:
    """Run a command on every node: gradwire lab run --nodes 4 --net 1gbit,1ms -- CMD.

    Each node gets torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, ...).
    """
    from gradwire.lab.run import run_command

    raise typer.Exit(run_command(context.args, nodes, net, timeout))


@bench.command("kernels")
def bench_kernels(
    codec_name: Annotated[
        str | None, typer.Option("--codec", help="Names, comma-separated.")
    ] = None,
    target: Annotated[str | None, typer.Option("--target", help="eager, c; triton.")] = None,
    numel: Annotated[
        int | None,
        typer.Option("--numel", help="Values; 16777216 (cuda: four times) unless quick."),
    ] = None,
    threads: Annotated[str | None, typer.Option("--threads", help="Such as 1,2.")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """Time encode, encode_ef, decode and decode_add against the speed of memory."""
    from gradwire.bench import kernels

    counts = _numbers("--threads", threads) or None
    rows = kernels.run(_list(codec_name), _list(target), numel, counts, quick, device)
    columns = ["codec", "target", "threads", "op", "numel", "seconds", "gbps", "of_limit"]
    with output(json_file) as out:
        out.rows(rows, columns)


@bench.command("collectives")
def bench_collectives(
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 4,
    net: Net = "1gbit,1ms",
    methods: Annotated[str | None, typer.Option("--methods", help="Comma-separated.")] = None,
    codec_name: Annotated[str | None, typer.Option("--codec", help="gradwire's codecs.")] = None,
    numel: Annotated[
        int | None, typer.Option("--numel", help="Values; 25000000 unless quick.")
    ] = None,
    quick: Quick = False,
    per_node: Annotated[int, typer.Option(help="Ranks of a machine, which share its link.")] = 1,
    json_file: Json = None,
) -> None:
    """Time all-reduces on an emulated network against the limit of the wire."""
    from gradwire.bench import collectives

    rows = collectives.run(ranks, net, _list(methods), _list(codec_name), numel, quick, per_node)
    columns = ["method", "net", "numel", "seconds", "wire_bytes", "of_limit", "nmse"]
    with output(json_file) as out:
        out.rows(rows, columns)


@bench.command("transports")
def bench_transports(
    sizes: Annotated[
        str | None, typer.Option("--bytes", help="Of a message, comma-separated.")
    ] = None,
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """Time messages between two ranks: shared memory, and gloo on loopback."""
    from gradwire.bench import transports

    rows = transports.run(_list(sizes), quick)
    with output(json_file) as out:
        out.rows(rows, ["transport", "bytes", "latency_us", "gbps"])


@bench.command("profile")
def bench_profile(
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 2,
    net: Net = "none",
    methods: Annotated[str | None, typer.Option("--methods", help="Of gradwire.")] = None,
    numel: Annotated[int | None, typer.Option("--numel", help="Values of the gradient.")] = None,
    bucket_mb: Annotated[
        float | None, typer.Option("--bucket-mb", help="DDP's bucket_cap_mb; else one bucket.")
    ] = None,
    trace: Annotated[
        str | None, typer.Option("--trace", help="File for a step, for chrome://tracing.")
    ] = None,
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """What a DDP bucket costs beyond kernels and the wire, thread by thread."""
    from gradwire.bench import profile

    rows = profile.run(ranks, net, _list(methods), numel, bucket_mb, trace, quick)
    with output(json_file) as out:
        out.rows(rows, ["method", "part", "seconds", "steps", "transport", "ranks", "numel"])


@bench.command("train")
def bench_train(
    task: Annotated[str, typer.Option("--task", help="gpt or image.")] = "gpt",
    net: Annotated[str | None, typer.Option("--net", help="RATE,LATENCY or none.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Emulated machines, one rank each.")] = None,
    method_names: Annotated[
        str | None, typer.Option("--methods", help="Names, or gradwire:CODEC:OPTION=VALUE:...")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Such as 0,1,2.")] = "0",
    steps: Annotated[int | None, typer.Option(help="Training steps of each method.")] = None,
    target: Annotated[float | None, typer.Option(help="Validation loss to reach.")] = None,
    quick: Quick = False,
    json_file: Json = None,
) -> None:
    """Train with several methods; report time to accuracy against 16 bit."""
    from gradwire.bench import train, train_view

    with output(json_file) as out:
        config = train.plan(
            task=task,
            net=net,
            nodes=nodes,
            methods=tuple(_list(method_names) or ()) or None,
            seeds=tuple(_numbers("--seeds", seeds)),
            steps=steps,
            target=target,
            quick=quick,
        )
        rows = []
        for row in train_view.watch(config, out.console):
            out.row(row)
            rows.append(row)
        out.console.print(train_view.table([row for row in rows if row["row"] == "summary"]))


@app.command()
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
    per_node: Annotated[int, typer.Option(help="Ranks of a node, which share its link.")] = 1,
    cores: Annotated[
        float | None, typer.Option(help="That all ranks share; each has its own unless given.")
    ] = None,
    backward: Annotated[
        float, typer.Option(help="Seconds in which gradients become ready, one after the other.")
    ] = 0.0,
    segments: Annotated[int | None, typer.Option(help="Pipeline units a chunk.")] = None,
    partitions: Annotated[int | None, typer.Option(help="Of parameter_server.")] = None,
    coordinated: Annotated[bool, typer.Option("--coordinated", help="Send in rounds.")] = False,
    threads: Annotated[int, typer.Option(help="Of a kernel.")] = 1,
    curves: Annotated[
        Path | None, typer.Option("--curves", help="What kernels cost; written if missing.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure kernels anew.")] = False,
    validate: Annotated[
        bool, typer.Option("--validate", help="Compare with the lab, at its own points.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Validate few points.")] = False,
    json_file: Json = None,
) -> None:
    """Predict what a step's collectives take, on networks that are not here."""
    from gradwire.bench import simulate
    from gradwire.bench import validate as validation

    with output(json_file) as out:
        if validate:
            points = validation.run(**(validation.QUICK if quick else {}), fresh=fresh)
            columns = ["ranks", "net", "method", "algorithm", "measured_seconds"]
            out.rows(points, [*columns, "simulated_seconds", "error"])
            return
        draw = None if plot is None else simulate.plotter(plot)
        options = {"segments": segments, "partitions": partitions, "coordinated": coordinated}
        wanted = simulate.Wanted(
            codecs=_list(codec_name) or [],
            algorithms=_list(algorithm) or [],
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
        rows = out.rows(simulate.run(wanted), [*(["value"] if sweep else []), *columns])
        if draw is not None:
            draw(rows)


@app.command()
def demo(
    page: Annotated[Path, typer.Option("--output", help="The HTML page.")] = Path("report.html"),
    net: Annotated[str | None, typer.Option("--net", help="Instead of one chosen here.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Train a GPT over a slow emulated network, with and without gradwire (3 minutes)."""
    from gradwire.bench import demo as demonstration

    demonstration.demo(page, json_file, Console(), net)


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="Rows that --json FILE wrote.")],
    page: Annotated[Path, typer.Option("--output", help="The HTML page.")] = Path("report.html"),
    svg: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE", help="Loss against time alone, instead of a page."),
    ] = None,
) -> None:
    """Make one self-contained HTML page with plots from benchmark rows."""
    from gradwire.bench import report as reports

    if svg is not None:
        reports.picture(files, svg)
        typer.echo(f"wrote {svg}")
        return
    reports.write(files, page)
    typer.echo(f"wrote {page}")


def main() -> None:
    """Run the command line; the user's mistakes end in one line on standard error."""
    try:
        app()
    except GradwireError as error:
        typer.secho(f"gradwire: {error}", err=True, fg="red")
        sys.exit(2)


if __name__ == "__main__":
    main()
