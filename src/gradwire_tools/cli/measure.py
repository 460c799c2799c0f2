"""`gradwire bench`: kernels, collectives, aggregators, transports, a bucket, training, errors,
policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from gradwire_tools.cli import options
from gradwire_tools.cli.grids import bench_ablation, bench_adapt, bench_grid, bench_planner
from gradwire_tools.cli.options import Real, Text, Whole, names, number, numbers, writable
from gradwire_tools.cli.output import measured
from gradwire_tools.cli.training import bench_train

bench = typer.Typer(help="Measure kernels, collectives and training.", no_args_is_help=True)


@bench.command("kernels")
def bench_kernels(
    codec_name: Annotated[Text, Option("--codec", help="Names, comma-separated.")] = None,
    target: Annotated[Text, Option(help="eager, c; triton.")] = None,
    numel: Annotated[
        Whole, Option(help="Values; 16777216 (cuda: four times) unless quick.")
    ] = None,
    threads: Annotated[Text, Option(help="Such as 1,2.")] = None,
    device: Annotated[str, Option(help="cpu or cuda.")] = "cpu",
    quick: options.Quick = False,
    json_file: options.Json = None,
) -> None:
    """Time encode, encode_ef, decode and decode_add against the speed of memory."""
    from gradwire_tools.bench.micro import kernels

    counts = numbers("--threads", threads)
    codecs, targets = names("--codec", codec_name), names("--target", target)
    columns = ["codec", "target", "threads", "op", "numel", "seconds", "gbps", "of_limit"]
    measured(json_file, columns, kernels.run, codecs, targets, numel, counts, quick, device)


@bench.command("collectives")
def bench_collectives(
    ranks: options.Ranks = 4,
    net: options.Net = "1gbit,1ms",
    methods: Annotated[Text, Option(help="Comma-separated.")] = None,
    codec_name: Annotated[Text, Option("--codec", help="gradwire's codecs.")] = None,
    numel: Annotated[Whole, Option(help="Values; 25000000 unless quick.")] = None,
    quick: options.Quick = False,
    per_node: options.PerNode = 1,
    json_file: options.Json = None,
) -> None:
    """Time all-reduces on an emulated network against the limit of the wire."""
    from gradwire_tools.bench.network import collectives

    chosen, codecs = names("--methods", methods), names("--codec", codec_name)
    columns = ["method", "net", "numel", "seconds", "wire_bytes", "of_limit", "nmse"]
    given = ranks, net, chosen, codecs, numel, quick, per_node
    measured(json_file, columns, collectives.run, *given)


@bench.command("aggregators")
def bench_aggregators(
    methods: Annotated[Text, Option(help="Comma-separated; by default a sweep of ranks.")] = None,
    task: Annotated[
        str, Option(help="Whose gradients: gpt, gpt-32k, image or image-resnet50.")
    ] = "gpt",
    ranks: options.Ranks = 2,
    quick: options.Quick = False,
    json_file: options.Json = None,
) -> None:
    """CPU time and memory of aggregators, against a copy of the gradients."""
    from gradwire_tools.bench.micro import aggregators

    chosen = names("--methods", methods)
    columns = ["method", "ms_per_million", "of_limit", "orthogonal_share", "rounds", "wire_bytes"]
    columns += ["state_bytes_per_value"]
    measured(json_file, columns, aggregators.run, chosen, task, ranks, quick)


@bench.command("transports")
def bench_transports(
    sizes: Annotated[Text, Option("--bytes", help="Of a message, comma-separated.")] = None,
    quick: options.Quick = False,
    json_file: options.Json = None,
) -> None:
    """Time messages between two ranks: shared memory, and gloo on loopback."""
    from gradwire_tools.bench.network import transports

    wanted = names("--bytes", sizes)
    columns = ["transport", "bytes", "latency_us", "gbps"]
    measured(json_file, columns, transports.run, wanted, quick)


@bench.command("profile")
def bench_profile(
    ranks: options.Ranks = 2,
    net: options.Net = "none",
    methods: Annotated[Text, Option(help="Of gradwire.")] = None,
    numel: Annotated[Whole, Option(help="Values of the gradient.")] = None,
    bucket_mb: Annotated[Real, number("DDP's bucket_cap_mb; else one bucket.")] = None,
    trace: Annotated[Path | None, Option(help="File for a step, for chrome://tracing.")] = None,
    quick: options.Quick = False,
    json_file: options.Json = None,
) -> None:
    """What a DDP bucket costs beyond kernels and the wire, thread by thread."""
    from gradwire_tools.bench.micro import profile

    writable("--trace", trace)
    chosen, file = names("--methods", methods), None if trace is None else str(trace)
    columns = ["method", "part", "seconds", "steps", "transport", "ranks", "numel"]
    measured(json_file, columns, profile.run, ranks, net, chosen, numel, bucket_mb, file, quick)


bench.command("train")(bench_train)
bench.command("grid")(bench_grid)


@bench.command("record")
def bench_record(
    folder: Annotated[Path, Option("--output", help="A new folder.")],
    task: options.Task = "gpt",
    at: Annotated[Text, Option(help="Where recording begins; 0,100,400 unless quick.")] = None,
    steps: Annotated[Whole, Option(help="Consecutive steps at each; 8 unless quick.")] = None,
    ranks: options.Ranks = 4,
    seed: Annotated[int, Option(help="Of weights and batches.")] = 0,
    quick: options.Quick = False,
    json_file: options.Json = None,
) -> None:
    """Train, and store every rank's gradients of consecutive steps."""
    from gradwire_tools.bench.adapt import record

    points = numbers("--at", at)
    columns = ["task", "at", "steps", "ranks", "numel", "loss", "gradient_norm", "nbytes"]
    measured(json_file, columns, record.run, folder, task, points, steps, ranks, seed, quick)


@bench.command("error")
def bench_error(
    folders: Annotated[
        list[Path] | None, Argument(help="Of bench record; none with --quick.")
    ] = None,
    methods: Annotated[Text, Option(help="NAME:OPTION=VALUE:..., comma-separated.")] = None,
    algorithm: Annotated[Text, Option(help="Of all-reduces; sra unless given.")] = None,
    at: options.At = None,
    layers: Annotated[bool, Option("--layers", help="Rows for each parameter, too.")] = False,
    quick: options.Quick = False,
    json_file: options.Json = None,
) -> None:
    """What methods lose on recorded gradients, beside the bits that they send."""
    from gradwire_tools.bench.paper import error

    chosen, points = names("--methods", methods), numbers("--at", at)
    columns = ["at", *(["layer"] if layers else []), "method", "error_feedback", "nmse", "cosine"]
    columns += ["input_bits", "packed_bits"]
    given = folders or (), chosen, algorithm, points, layers, quick
    measured(json_file, columns, error.run, *given)


bench.command("adapt")(bench_adapt)
bench.command("planner")(bench_planner)
bench.command("ablation")(bench_ablation)
