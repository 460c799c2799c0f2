"""`gradwire plan`: what to send, on a given or measured network; and plans in files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from gradwire_tools.bench.quantities import times
from gradwire_tools.cli import options, tables
from gradwire_tools.cli.options import Text, command, names, writable
from gradwire_tools.cli.output import output

plan = options.group(
    "plan",
    "What to compress on a network, and plans in files.",
    "--model resnet50 --net 1gbit,1ms",
    no_args_is_help=False,
)


@plan.callback(invoke_without_command=True)
def decide(
    context: typer.Context,
    model: Annotated[Text, Option(help="resnet50, bert-large, ... or SIZES: 1e6,512x512.")] = None,
    shapes: Annotated[
        Path | None, Option(help="In place of --model: a file that handle.plan.save wrote.")
    ] = None,
    net: Annotated[Text, Option(help="RATE,LATENCY such as 1gbit,1ms; or none.")] = None,
    ranks: options.ManyRanks = 4,
    codec_name: Annotated[
        str, Option("--codec", help="Codecs or aggregators, comma-separated; exact first.")
    ] = "qsgd:bits=4,powersgd:rank=8",
    per_node: options.PerNode = 1,
    cores: options.Cores = None,
    backward: options.Backward = 0.0,
    threads: options.KernelThreads = 1,
    curves: options.CurvesFile = None,
    fresh: options.Fresh = False,
    save: Annotated[Path | None, Option(help="A plan for gw.attach(model, plan=FILE).")] = None,
    json_file: options.Json = None,
) -> None:
    """Which gradients to compress on a network, in which setting; or that bf16 or none is best."""
    if context.invoked_subcommand is not None:
        return
    if all(given is None for given in (model, shapes, net, save, json_file)):
        typer.echo(context.get_help())
        return
    from gradwire.decide.auto import EXACT
    from gradwire_tools.predict import planning

    given = None if "DEFAULT" in str(context.get_parameter_source("ranks")) else ranks
    wanted = planning.WantedPlan(
        model, shapes, net, names("--codec", codec_name) or [], given, per_node, cores, backward,
        threads, curves, fresh, save,
    )  # fmt: skip
    if curves is not None and (fresh or not curves.exists()):
        writable("--curves", curves)
    writable("--save", save)
    if wanted.world is not None and os.environ["RANK"] != "0":
        planning.join(wanted.world)  # rank 0 has the rows
        return
    with output(json_file) as out:
        rows = out.quiet(planning.run(wanted))
        layer = "numel count uncompressed_seconds compressed_seconds compress partitions"
        best = "method algorithm coordinated segments coalesce_bytes least seconds wire_bytes"
        settings = [row for row in rows if row["part"] == "setting"]
        plain = [row["method"] for row in settings if row["method"] in EXACT]  # the fastest first
        gain = f"faster_than_{plain[0]}"
        shown = [{**row, gain: times(1 / (1 - row["saves"]))} for row in settings]
        layers = [row for row in rows if row["part"] == "layer"]
        out.table(layers, layer.split(), title=tables.where(rows))
        out.table(shown, [*best.split(), gain])
        out.say(rows[-1]["detail"])


@command(plan, "show", "plan.json")
def show(
    file: Annotated[Path, Argument(help="A file that handle.plan.save wrote.")],
    json_file: options.Json = None,
) -> None:
    """How a plan sends each parameter, in how many bits per value."""
    from gradwire.planner.files import PlanFile, shown

    with output(json_file) as out:
        plan = PlanFile.read(file)
        rows = out.rows(shown(plan), ["parameter", "numel", "method", "bits"])
        known = [row for row in rows if row["bits"] is not None]
        numel = sum(row["numel"] for row in known)
        if known:
            bits = sum(row["bits"] * row["numel"] for row in known) / numel
            out.say(f"{len(rows)} parameters, {numel:,} values, {bits:.2f} bits per value")
        if "ranks" in plan.planned:
            out.say(f"planned for {plan.planned['ranks']} ranks on {plan.planned['net']}")


@command(plan, "diff", "a.json b.json")
def diff(
    a: Annotated[Path, Argument(help="A file that handle.plan.save wrote.")],
    b: Annotated[Path, Argument(help="Another.")],
    json_file: options.Json = None,
) -> None:
    """The parameters that two plans send differently."""
    from gradwire.planner.files import PlanFile, differences

    with output(json_file) as out:
        rows = list(differences(PlanFile.read(a), PlanFile.read(b)))
        if rows:
            out.rows(rows, ["parameter", "numel", "a", "b"])
        else:
            out.say("the plans are equal")
