"""`gradwire bench ablation`: what each part of the design brings, in the order of HIPRESS Fig. 12.

A codec begins with eager kernels, one call per tensor, on the whole gradient at once. Then, each
on top of those before:

    kernels      compiled ones
    pipelining   buckets are sent as they become ready, in segments
    bulk         one kernel call for all tensors of a task, and sends in coordinated rounds
    selective    the planner's setting: algorithm, partitions, buckets, which matrices to compress

Measured in the lab as a step of `gradwire doctor --ranks`, whose computing is a pause, and
simulated. "batching" is the bulk part without coordinated rounds.

A row: where ("lab" or "simulator"), part, method, model, ranks, net, numel, step_seconds (lab;
medians), synchronisation_seconds (averaging alone; in the simulator, from the start of backward to
the last average, less backward), cut (of synchronisation_seconds of the part before; None for the
first). The planner's setting need not have all parts: where one does not pay, it leaves it out.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from dataclasses import replace

from gradwire import codecs
from gradwire.collectives import Options
from gradwire.errors import ConfigError
from gradwire.planner import kernel_costs
from gradwire_tools.bench import memory
from gradwire_tools.bench.micro import curves as measuring
from gradwire_tools.bench.network.network import MeasuredStep, copies
from gradwire_tools.bench.network.world import World, emulable, several
from gradwire_tools.bench.paper.planner_grid import fitted_to_lab, in_lab, method_of
from gradwire_tools.bench.progress import cells
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.rows import Row, row_kind
from gradwire_tools.lab import Network
from gradwire_tools.sim import models
from gradwire_tools.sim.choice import FULL, HALF, Setting, choose, simulate

KINDS = (
    row_kind(
        "bench ablation",
        "where part cut",
        "where:text part:text method:text ranks:positive net:text numel:count "
        "step_seconds:amount? synchronisation_seconds:amount cut:number?",
        "model:text",
    ),
)

MOST_TURNS = 1000
_PARTS = 6
_TOGETHER = 1 << 40  # bytes: one bucket
_TIMEOUT_S = 1800.0


@stamped
def run(
    ranks: int = 4,
    net: str = "1gbit,1ms",
    model: str = "resnet50",
    codec: str = "qsgd:bits=4",
    compute: float = 0.1,
    turns: int = 5,
    lab: bool = True,
) -> Iterator[Row]:
    """Yield the rows.

    Args:
        ranks, net, model: as of `gradwire plan`.
        compute: seconds that a step computes; two thirds of them are backward.
        turns: of all parts, in the lab.
        lab: False simulates only.

    Raises:
        ConfigError: a bad argument, or no lab on this machine.
        WorkerError: a rank failed.
    """
    network = Network.parse(net)
    shapes = models.shapes(model)
    several(ranks)
    if not compute > 0:
        raise ConfigError(f"--compute {compute:g}: give seconds above 0")
    if not 1 <= turns <= MOST_TURNS:
        raise ConfigError(f"--turns {turns}: give 1 to {MOST_TURNS}")
    size = models.numel(shapes)
    if lab:
        memory.check(f"--model {model} on {ranks} ranks", 4 * size * copies(_PARTS) * ranks)
        emulable(network, instead="give --no-lab")
    chosen = codecs.get(codec)
    known = measuring.measured([FULL, HALF, chosen])
    if lab:
        known = fitted_to_lab(known, ranks, network, size)
    backward = compute * 2 / 3
    cores = float(len(os.sched_getaffinity(0))) if lab else float("inf")
    where = replace(in_lab(known, ranks, network, shapes), cores=cores, backward=backward)
    parts = _parts(choose(where, [chosen]).of(chosen).setting)
    methods = {part: _method(*of) for part, of in parts.items()}

    def simulated() -> Iterator[tuple[None, float]]:
        eager = {repr(c): kernel_costs.kernel_curves(c, 1, "eager") for c in (FULL, chosen)}
        slow = replace(where, curves=replace(where.curves, codecs={**known.codecs, **eager}))
        for setting, target in parts.values():
            found = simulate(slow if target == "eager" else where, setting)
            yield None, found.seconds - backward

    def in_the_lab() -> Iterator[tuple[float, float]]:
        # The planner's setting may be that of a part: then they are one measurement.
        names = tuple(dict.fromkeys(methods.values()))
        world, budget = World(ranks, network), _TIMEOUT_S / 3
        step = MeasuredStep(world, shapes, compute, names, turns, budget, _TIMEOUT_S)
        times = {row["method"]: _medians(row) for row in step.measured()[1:]}  # behind the links
        yield from (times[name] for name in methods.values())

    def rows(place: str) -> Iterator[Row]:
        context = {"model": model, "ranks": ranks, "net": str(network), "numel": size}
        before: float | None = None
        times = simulated() if place == "simulator" else in_the_lab()
        for (part, method), (step, seconds) in zip(methods.items(), times, strict=True):
            cut = 1 - seconds / before if before else None  # none, or nothing to cut
            about = {"where": place, "part": part, "method": method, **context}
            yield {**about, "step_seconds": step, "synchronisation_seconds": seconds, "cut": cut}
            before = seconds

    yield from cells("{0}", rows, ["simulator", "lab"] if lab else ["simulator"])


def part_gain(row: Row) -> float | None:
    """How many times faster averaging is with a row's part than before; None: not known."""
    return None if row["cut"] in (None, 1) else 1 / (1 - float(row["cut"]))


def _parts(best: Setting) -> dict[str, tuple[Setting, str]]:
    """Of each part, with all those before it, the setting and the kernels' target."""
    codec = best.codec
    plain = Options(segments=1, batched=False)
    return {
        "none": (Setting(codec, plain, _TOGETHER), "eager"),
        "kernels": (Setting(codec, plain, _TOGETHER), ""),
        "pipelining": (Setting(codec, Options(batched=False)), ""),
        "batching": (Setting(codec, Options()), ""),
        "bulk": (Setting(codec, Options(coordinated=True)), ""),
        "selective": (best, ""),
    }


def _method(setting: Setting, target: str) -> str:
    text = method_of(setting) + f":coalesce_bytes={setting.coalesce_bytes}"
    if not setting.options.batched:
        text += ":batched=false"
    if setting.least:
        text += f":least={setting.least}"
    return text + (f":target={target}" if target else "")


def _medians(row: Row) -> tuple[float, float]:
    """Median seconds of a step, and of averaging alone."""
    step, computing = statistics.median(row["steps"]), statistics.median(row["computing"])
    return step, max(step - computing, 0.0)
