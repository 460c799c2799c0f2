"""`gradwire bench grid`, `bench adapt`, `bench planner` and `bench ablation`: the papers' grids."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from gradwire.errors import ConfigError
from gradwire_tools.cli import options
from gradwire_tools.cli.options import Text, names, number, numbers
from gradwire_tools.cli.output import measured, output
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
    quick: options.Quick = False,
    json_file: options.Json = None,
) -> None:
    """What adaptive policies save against a uniform plan of the same error."""
    from gradwire_tools.bench.paper import adapt

    given: dict[str, Any] = {
        "policies": names("--policies", policies),
        "references": names("--references", references),
        "families": names("--families", families),
        "blocks": numbers("--blocks", blocks),
        "models": [] if models == "none" else names("--models", models),
        "sigmas": _floats("--sigmas", sigmas),
        "at": numbers("--at", at),
        "metrics": names("--metrics", metrics),
    }
    chosen = {name: tuple(value) for name, value in given.items() if value is not None}
    config = adapt.Config(**chosen, seed=seed, alpha=alpha)
    columns = ["task", "at", "sigma", "family", "reference", "error_metric", "policy"]
    columns += ["ratio", "of_uniform"]
    measured(json_file, columns, adapt.run, folders or (), config, quick)


def _floats(option: str, text: str | None) -> list[float] | None:
    """The numbers of an option that takes several; None if it is not given."""
    found = names(option, text)
    if found is None:
        return None
    try:
        return [float(part) for part in found]
    except ValueError:
        raise ConfigError(f"{option} {text}: give numbers, separated by commas") from None


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

    columns = ["where", "part", "net", "synchronisation_seconds", "cut", "step_seconds"]
    measured(json_file, columns, ablation.run, ranks, net, model, codec_name, compute, turns, lab)
