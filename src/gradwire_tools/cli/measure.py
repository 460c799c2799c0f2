"""`gradwire bench`: kernels, collectives, aggregators, transports, a bucket, training, errors,
policies, and the papers' grids."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from gradwire.errors import ConfigError, use_one_of
from gradwire_tools.bench.quantities import times
from gradwire_tools.cli import options, tables
from gradwire_tools.cli.options import Real, Text, Whole, names, number, numbers, writable
from gradwire_tools.cli.output import measured, output
from gradwire_tools.cli.training import bench_train, task_options, trained

bench = options.group("bench", "Measure collectives, kernels and training.", "collectives --quick")
developer = partial(options.command, bench, rich_help_panel=options.DEVELOPERS)


@options.command(bench, "collectives", "--ranks 4 --net 100mbit,1ms --quick")
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


@options.command(bench, "kernels", "--codec qsgd,topk --quick")
def bench_kernels(
    codec_name: Annotated[Text, Option("--codec", help="Names, comma-separated.")] = None,
    target: Annotated[Text, Option(help="eager, c; triton.")] = None,
    numel: Annotated[
        Whole, Option(help="Values; 16777216 (cuda: four times) unless quick.")
    ] = None,
    threads: Annotated[Text, Option(help="Such as 1,2.")] = None,
    device: Annotated[str, Option(help="cpu or cuda.")] = "cpu",
    quick: options.QuickAlone = False,
    json_file: options.Json = None,
) -> None:
    """Time codecs' kernels, from encode to reduce_encode, against the speed of memory."""
    from gradwire_tools.bench.micro import kernels

    counts = numbers("--threads", threads)
    codecs, targets = names("--codec", codec_name), names("--target", target)
    columns = ["codec", "target", "threads", "op", "numel", "seconds", "gbps", "of_limit"]
    measured(json_file, columns, kernels.run, codecs, targets, numel, counts, quick, device)


options.command(bench, "train", "--net 100mbit,1ms --json rows.jsonl")(bench_train)


@developer("aggregators", "--methods powersgd:rank=8 --quick")
def bench_aggregators(
    methods: Annotated[Text, Option(help="Comma-separated; by default a sweep of ranks.")] = None,
    task: Annotated[
        str, Option(help="Whose gradients: gpt, gpt-32k, gpt-124m, image or image-resnet50.")
    ] = "gpt",
    ranks: options.Ranks = 2,
    quick: options.QuickAlone = False,
    json_file: options.Json = None,
) -> None:
    """CPU time and memory of aggregators, against a copy of the gradients."""
    from gradwire_tools.bench.micro import aggregators

    chosen = names("--methods", methods)
    columns = ["method", "ms_per_million", "of_limit", "orthogonal_share", "rounds", "wire_bytes"]
    columns += ["state_bytes_per_value"]
    measured(json_file, columns, aggregators.run, chosen, task, ranks, quick)


@developer("transports", "--bytes 1024,1048576")
def bench_transports(
    sizes: Annotated[Text, Option("--bytes", help="Of a message, comma-separated.")] = None,
    quick: options.QuickAlone = False,
    json_file: options.Json = None,
) -> None:
    """Time messages between two ranks: shared memory, and gloo on loopback."""
    from gradwire_tools.bench.network import transports

    wanted = names("--bytes", sizes)
    columns = ["transport", "bytes", "latency_us", "gbps"]
    measured(json_file, columns, transports.run, wanted, quick)


@developer("profile", "--net 1gbit,1ms --methods qsgd:bits=4")
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


@developer("grid", "--grid bits --net none --json grid.jsonl")
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


@developer("record", "--output recorded --quick")
def bench_record(
    folder: Annotated[Path, Option("--output", "-o", help="A new folder.")],
    task: options.Task = "gpt",
    at: Annotated[Text, Option(help="Where recording begins; 0,100,400 unless quick.")] = None,
    steps: Annotated[Whole, Option(help="Consecutive steps at each; 8 unless quick.")] = None,
    ranks: options.Ranks = 4,
    seed: Annotated[int, Option(help="Of weights and batches.")] = 0,
    quick: options.QuickAlone = False,
    json_file: options.Json = None,
) -> None:
    """Train, and store every rank's gradients of consecutive steps."""
    from gradwire_tools.bench.adapt import record

    points = numbers("--at", at)
    columns = ["task", "at", "steps", "ranks", "numel", "loss", "gradient_norm", "nbytes"]
    measured(json_file, columns, record.run, folder, task, points, steps, ranks, seed, quick)


@developer("error", "recorded --methods qsgd:bits=4,topk")
def bench_error(
    folders: Annotated[
        list[Path] | None, Argument(help="Of bench record; none with --quick.")
    ] = None,
    methods: Annotated[Text, Option(help="NAME:OPTION=VALUE:..., comma-separated.")] = None,
    algorithm: Annotated[Text, Option(help="Of all-reduces; sra unless given.")] = None,
    at: options.At = None,
    layers: Annotated[bool, Option("--layers", help="Rows for each parameter, too.")] = False,
    quick: options.QuickAlone = False,
    json_file: options.Json = None,
) -> None:
    """What methods lose on recorded gradients, beside the bits that they send."""
    from gradwire_tools.bench.paper import error

    chosen, points = names("--methods", methods), numbers("--at", at)
    columns = ["at", *(["layer"] if layers else []), "method", "error_feedback", "nmse", "cosine"]
    columns += ["input_bits", "packed_bits"]
    given = folders or (), chosen, algorithm, points, layers, quick
    measured(json_file, columns, error.run, *given)


@developer("adapt", "recorded --policies lgreco --quick")
def bench_adapt(
    folders: Annotated[
        list[Path] | None, Argument(help="Of bench record; seeded tables come beside.")
    ] = None,
    policies: Annotated[Text, Option(help="NAME:OPTION=VALUE:..., comma-separated.")] = None,
    references: Annotated[
        Text,
        Option(help="Uniform plans; qsgd:bits=4,topk:density=0.01,powersgd:rank=4 unless given."),
    ] = None,
    families: Annotated[Text, Option(help="Of bits, topk, rank and mixed.")] = None,
    blocks: Annotated[Text, Option(help="Block sizes beside the reference's, as 64,1024.")] = None,
    models: Annotated[Text, Option(help="Of seeded tables, or none.")] = None,
    sigmas: Annotated[Text, Option(help="Spread of layers' norms; 0.3,1,2 unless given.")] = None,
    seed: Annotated[int, Option(help="Of seeded tables.")] = 0,
    at: options.At = None,
    metrics: Annotated[Text, Option(help="l2, squared; both.")] = None,
    alpha: Annotated[float, number("The budget over the uniform plan's error.")] = 1.0,
    of: Annotated[
        str, Option("--sensitivity", help="error; or loss: of runs with one group compressed.")
    ] = "error",
    steps: Annotated[Whole, Option("--run-steps", help="Of such a run; 50 unless quick.")] = None,
    quick: options.QuickAlone = False,
    json_file: options.Json = None,
) -> None:
    """What adaptive policies save against a uniform plan of the same error."""
    from gradwire_tools.bench.paper import adapt, sensitivity

    given: dict[str, Any] = {
        "policies": names("--policies", policies),
        "references": names("--references", references),
        "families": names("--families", families),
        "blocks": numbers("--blocks", blocks),
        "models": [] if models == "none" else names("--models", models),
        "sigmas": numbers("--sigmas", sigmas, float),
        "at": numbers("--at", at),
        "metrics": names("--metrics", metrics),
    }
    chosen = {name: tuple(value) for name, value in given.items() if value is not None}
    config = adapt.Config(**chosen, seed=seed, alpha=alpha)
    if of not in sensitivity.TABLES:
        raise ConfigError(f"--sensitivity {of}: {use_one_of(of, sensitivity.TABLES)}")
    if of == "loss":
        columns = ["task", "at", "row", "reference", "group", "method", "policy", "sensitivity"]
        columns += ["error", "loss_change", "spearman", "of_uniform"]
        measured(json_file, columns, sensitivity.run, folders or (), config, quick, steps)
        return
    if steps is not None:
        raise ConfigError(f"--run-steps {steps}: only --sensitivity loss has runs: leave it out")
    columns = ["task", "at", "sigma", "family", "reference", "error_metric", "policy"]
    columns += ["ratio", "of_uniform"]
    measured(json_file, columns, adapt.run, folders or (), config, quick)


@developer("planner", "--ranks 2 --nets '100mbit,1ms;none'")
def bench_planner(
    ranks: options.Ranks = 4,
    nets: Annotated[Text, Option(help="Such as 100mbit,1ms;none: separated by ;.")] = None,
    sizes: Annotated[
        Text, Option("--bytes", help="Of fp32 gradients; 16 KB to 64 MB unless given.")
    ] = None,
    codec_name: Annotated[
        str, Option("--codec", help="NAME:OPTION=VALUE:..., comma-separated; exact first.")
    ] = "qsgd:bits=4",
    fresh: options.Fresh = False,
    json_file: options.Json = None,
) -> None:
    """The planner's choice against the best setting that is measured, by size and network."""
    from gradwire_tools.bench.paper import planner_grid

    given: dict[str, Any] = {
        "nets": names("--nets", nets, ";"),
        "sizes": numbers("--bytes", sizes),
        "codecs": names("--codec", codec_name),
    }
    chosen = {name: tuple(value) for name, value in given.items() if value}
    columns = ["net", "nbytes", "method", "seconds", "best_method", "ratio", "partition_ratio"]
    measured(json_file, columns, planner_grid.run, ranks, **chosen, fresh=fresh)


@developer("ablation", "--ranks 4 --net 1gbit,1ms")
def bench_ablation(
    ranks: options.Ranks = 4,
    net: options.Net = "1gbit,1ms",
    model: options.Model = "resnet50",
    codec_name: Annotated[str, Option("--codec", help="NAME:OPTION=VALUE:...")] = "qsgd:bits=4",
    compute: Annotated[float, number("Seconds that a step computes.")] = 0.1,
    turns: Annotated[int, Option(help="Of all parts, in the lab.")] = 5,
    lab: Annotated[bool, Option(help="Measure in the lab, beside the simulator.")] = True,
    json_file: options.Json = None,
) -> None:
    """What kernels, pipelining, batching and selective compression bring, one after the other."""
    from gradwire_tools.bench.paper import ablation

    columns = ["where", "part", "synchronisation_seconds", "faster_than_before", "step_seconds"]
    with output(json_file) as out:
        rows = out.quiet(ablation.run(ranks, net, model, codec_name, compute, turns, lab))
        gains = [gain and times(gain) for gain in map(ablation.part_gain, rows)]
        shown = [row | {columns[3]: gain} for row, gain in zip(rows, gains, strict=True)]
        out.table(shown, columns, title=tables.where(rows))
