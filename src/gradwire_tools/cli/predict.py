"""`gradwire sim`: predictions, and their comparison with the lab."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from gradwire.errors import ConfigError
from gradwire_tools.bench.quantities import times
from gradwire_tools.cli import options, tables
from gradwire_tools.cli.options import Real, Text, Whole, names, number, writable
from gradwire_tools.cli.output import output


def sim(
    ranks: options.ManyRanks = 4,
    net: options.Net = "1gbit,1ms",
    codec_name: Annotated[
        Text, Option("--codec", help="Codecs or aggregators, comma-separated; or qsgd.")
    ] = None,
    algorithm: Annotated[str, Option(help="Comma-separated.")] = "sra",
    model: options.Model = "resnet50",
    sharded: Annotated[
        bool, Option("--sharded", help="A step under FSDP2: weights are sent, too.")
    ] = False,
    method_names: Annotated[
        Text,
        Option("--methods", help="Replicas, outer:PRESET:every=N; or of bench train --sharded."),
    ] = None,
    bucket_mb: Annotated[Real, number("MiB at which DDP closes a bucket.")] = None,
    cross_barrier: Annotated[
        bool, Option("--cross-barrier", help="Steps that do not wait for their last averages, too.")
    ] = False,
    forward: Annotated[Real, number("Of whole steps: its seconds; half of --backward.")] = None,
    blocking: Annotated[
        bool, Option("--blocking", help="With --sharded: wait as FSDP2 does on a CPU.")
    ] = False,
    replicas: Annotated[int, Option(help="With --sharded: machines that replicate (HSDP).")] = 1,
    accumulate: Annotated[int, Option(help="With --replicas: micro-batches per step.")] = 1,
    undeferred: Annotated[
        bool, Option("--undeferred", help="Average replicas in each micro-batch, not in the last.")
    ] = False,
    sweep: Annotated[Text, Option(help="Such as ranks=2,4,8 or rate=1gbit,10gbit.")] = None,
    plot: Annotated[Path | None, Option(help="A FILE.png or FILE.svg.")] = None,
    per_node: options.PerNode = 1,
    cores: options.Cores = None,
    backward: options.Backward = 0.0,
    segments: Annotated[Whole, Option(help="Pipeline units per chunk.")] = None,
    partitions: Annotated[Whole, Option(help="Of parameter_server; one per rank.")] = None,
    coordinated: Annotated[bool, Option("--coordinated", help="Send in rounds.")] = False,
    threads: options.KernelThreads = 1,
    curves: options.CurvesFile = None,
    fresh: options.Fresh = False,
    validate: Annotated[
        bool, Option("--validate", help="Compare with the lab, at its own points.")
    ] = False,
    quick: Annotated[bool, Option("--quick", help="Validate fewer points.")] = False,
    json_file: options.Json = None,
) -> None:
    """Predict what a step's collectives take, on simulated networks."""
    from gradwire_tools.bench.paper import validate as validation
    from gradwire_tools.bench.train.sharded import COMPARED
    from gradwire_tools.predict import sim_plot, simulate, simulate_outer, simulate_sharded

    hsdp: dict[str, Any] = {
        "replicas": replicas,
        "accumulate": accumulate,
        "undeferred": undeferred,
    }
    meets = method_names is not None and not sharded
    of_sharded = {"--blocking": blocking or None}
    of_sharded |= {
        f"--{n}": None if given == (n != "undeferred") else given for n, given in hsdp.items()
    }
    for option, given in of_sharded.items():
        if given is not None and not sharded:
            raise ConfigError(f"{option}: is for a step under FSDP2: give --sharded, too")
    if forward is not None and not (sharded or cross_barrier or meets):
        raise ConfigError(
            "--forward: is of a whole step: give --sharded, --cross-barrier or --methods, too"
        )
    if meets and (validate or cross_barrier):
        raise ConfigError("--methods: leave --validate and --cross-barrier out")
    if sharded and (cross_barrier or bucket_mb is not None):
        raise ConfigError(
            "--cross-barrier and --bucket-mb are for DDP: FSDP2 sends group by group, and gathers "
            "the next layer's weights while this one computes: leave them out"
        )
    if sharded and codec_name is not None:
        raise ConfigError(
            f"--codec {codec_name}: a step under FSDP2 has codecs of weights and of gradients: "
            "give --methods, as in qsdp:w=8:g=8"
        )
    if validate and (cross_barrier or bucket_mb is not None):
        raise ConfigError("--validate: leave --cross-barrier and --bucket-mb out")
    if sharded and (validate or partitions is not None or coordinated):
        raise ConfigError("--sharded: leave --validate, --partitions and --coordinated out")
    with output(json_file) as out:
        if validate:
            points = validation.QUICK if quick else {}
            columns = ["ranks", "net", "method", "algorithm", "measured_seconds"]
            compared = validation.run(**points, fresh=fresh)
            out.measured(compared, [*columns, "simulated_seconds", "error"])
            return
        draw = None if plot is None else sim_plot.plotter(plot)
        writable("--plot", plot)
        if curves is not None and (fresh or not curves.exists()):
            writable("--curves", curves)
        options = {"segments": segments, "partitions": partitions, "coordinated": coordinated}
        common: dict[str, Any] = {
            "algorithms": names("--algorithm", algorithm) or [], "ranks": ranks, "net": net,
            "model": model, "per_node": per_node, "cores": cores, "backward": backward,
            "options": options, "sweep": sweep, "threads": threads, "file": curves, "fresh": fresh,
        }  # fmt: skip
        if sharded:
            chosen = names("--methods", method_names) or COMPARED
            wanted: simulate.WantedStep = simulate_sharded.WantedSharded(
                methods=chosen, forward=forward, blocking=blocking, **hsdp, **common
            )
            columns = ["method", "seconds", "weights_wire_bytes", "gradients_wire_bytes"]
            columns += ["ratio", "of_limit"]
        elif meets:
            codecs = names("--codec", codec_name) or ["identity", "qsgd:bits=4"]
            chosen = names("--methods", method_names) or []
            wanted = simulate_outer.WantedOuter(
                methods=chosen, codecs=codecs, bucket_mb=bucket_mb, forward=forward, **common
            )
            gain = f"faster_than_{codecs[0]}"
            columns = ["method", "algorithm", "every", "seconds", "exposed_seconds", "wire_bytes"]
            columns.append(gain)
        else:
            codecs = names("--codec", codec_name) or ["qsgd"]
            of_ddp: dict[str, Any] = {
                "bucket_mb": bucket_mb,
                "cross_barrier": cross_barrier,
                "forward": forward,
            }
            wanted = simulate.WantedCollectives(codecs=codecs, **of_ddp, **common)
            columns = ["codec", "algorithm", "seconds", "wire_bytes", "of_limit", "exact"]
            columns[2:2] = ["barrier_seconds"] if cross_barrier else []
        rows = out.quiet(simulate.run(wanted))
        if sweep:
            columns.insert(0, rows[0]["sweep"])
        shown = [{**row, columns[0]: row["value"]} if sweep else row for row in rows]
        if meets:
            shown = [
                {**row, gain: None if row["gain"] is None else times(row["gain"])} for row in shown
            ]
        out.table(shown, columns, title=tables.where(rows))
        if draw is not None:
            draw(rows)
