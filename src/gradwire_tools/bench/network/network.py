"""`gradwire doctor --ranks N`: is the network the problem, and does compression pay?

One training step is measured under DDP: with torch's fp32 all-reduce, with torch's fp16 hook, and
with gradwire at 4 bits. The step has the parameters of a given model. Its computing is a stand-in:
a linear layer of each parameter's shape, 64 rows per rank; or a pause of given length, for a device
that computes while the CPU is free. The gradients live on the CPU and travel over gloo, or over
shared memory where gradwire finds it. Methods take turns; a turn begins with a step that is not
timed. Seconds are those of the slowest rank, and medians over turns.

A row per method: part ("step METHOD"), available, detail, method, ranks, net, numel, machines
(how many the ranks are on), transport (of gradwire's messages), load and cores (of the busiest
machine: processes that ran or waited for a core in the minute before, on average), and

    step_seconds            forward, backward and averaging
    compute_seconds         forward and backward without averaging
    communication_seconds   averaging alone, of gradients that cost nothing to compute
    exposed_seconds         step_seconds - compute_seconds: what computing does not hide
    turn_seconds            step_seconds of every turn

The last row: part "verdict", available (whether compression pays), detail (lines of text: the
verdict first, the line to write last).
All rows have `run` (gradwire_tools.bench.provenance).
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.errors import ConfigError
from gradwire_tools.bench import memory, workers
from gradwire_tools.bench.network import network_verdict
from gradwire_tools.bench.network.world import World, started_by_torchrun
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.rows import row_kind
from gradwire_tools.bench.train import methods
from gradwire_tools.lab import Network
from gradwire_tools.sim import models

_STEP = (
    "part:text available:flag detail:text method:text net:text ranks:positive numel:count "
    "step_seconds:amount compute_seconds:amount communication_seconds:amount "
    "exposed_seconds:amount turn_seconds:amounts"
)
_STEP_MORE = "machines:positive transport:text load:amount cores:positive"
KINDS = (
    row_kind("doctor", "part available method", _STEP, _STEP_MORE),
    row_kind("doctor", "part available step_seconds", _STEP),
    row_kind("doctor", "part available detail", "part:text available:flag detail:text"),
)


METHODS = (network_verdict.FULL, network_verdict.HALF, network_verdict.OURS)
NUMEL = 5_000_000
_WORKER = "gradwire_tools.bench.network.network_worker"
_LAYERS = 8
_TIMEOUT_S = 600.0


def copies(methods: int) -> int:
    """Of the model that a rank holds at most: weights, temporaries, and each method's gradients and
    buckets."""
    return 2 + 2 * methods


@dataclass(frozen=True)
class StepConfig:
    """What every rank is told.

    Attributes:
        shapes: of the parameters.
        compute_seconds: of the pause that stands for computing; None computes linear layers.
        turns: of all methods, at most; `budget_seconds` may end them after three.
    """

    shapes: tuple[tuple[int, ...], ...]
    compute_seconds: float | None
    methods: tuple[str, ...]
    turns: int
    budget_seconds: float


@dataclass(frozen=True)
class StepMeasurement:
    """What the command line asks for."""

    world: World
    config: StepConfig


def plan(
    ranks: int | None = None,
    net: str = "none",
    numel: int | None = None,
    model: str | None = None,
    compute: float | None = None,
    quick: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> StepMeasurement | None:
    """What is to be measured; None if that was not asked for.

    Args:
        ranks: None measures only where torchrun has started several ranks.
        net: RATE,LATENCY between ranks that are started here, or none.
        numel: values of the gradient; 5 million unless given.
        model: instead of numel, a name or sizes as in `gradwire sim`.
        compute: seconds that the step computes.

    Raises:
        ConfigError: a number that makes no sense, an impossible network, or options that do not go
            together.
    """
    if ranks is None and started_by_torchrun(environment) == 1:
        asked = {"--numel": numel, "--model": model, "--compute": compute}
        shaped = Network.parse(net).shaped or None
        for name, value in (asked | {"--net": shaped}).items():
            if value is not None:
                raise ConfigError(f"{name} belongs to the measured step: give --ranks too")
        return None
    world = World.of(ranks, net, environment)
    if numel is not None and model is not None:
        raise ConfigError("--numel and --model: give one of them")
    if numel is not None and numel < 1:
        raise ConfigError(f"--numel {numel}: a gradient has 1 value or more")
    if compute is not None and not (compute > 0 and math.isfinite(compute)):
        raise ConfigError(f"--compute {compute:g}: give seconds above 0")
    shapes = models.shapes(model) if model is not None else _layers(numel or NUMEL)
    size, here = models.numel(shapes), 1 if world.joins else world.count
    memory.check(f"a step of {size} values", 4 * size * copies(len(METHODS)) * here)
    turns, budget = (5, 15.0) if quick else (11, 60.0)
    config = StepConfig(shapes, compute, METHODS, turns, budget)
    return StepMeasurement(world, config)


@stamped
def run(
    wanted: StepMeasurement, advance: workers.Advance | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows: a row per method, and the verdict.

    Raises:
        ConfigError: this machine has no compiled kernels.
        WorkerError: a rank failed.
        TransportError: torchrun's ranks cannot be joined.
    """
    world, config = wanted.world, wanted.config
    for name in config.methods:
        methods.parse(name).check()
    if world.joins:
        measured = join(wanted, advance)
    else:
        measured = workers.rows(_WORKER, config, world.count, world.network, _TIMEOUT_S, advance)
    where = {"ranks": world.count, "net": world.net, "numel": models.numel(config.shapes)}
    rows = [_row(seconds, where) for seconds in measured]
    yield from rows
    pays, text = network_verdict.verdict(rows)
    yield {"part": "verdict", "available": pays, "detail": text}


def join(wanted: StepMeasurement, advance: workers.Advance | None = None) -> list[dict[str, Any]]:
    """Measure as one of the ranks that torchrun has started; all ranks return the same."""
    from gradwire_tools.bench.network import network_worker

    with wanted.world.joined():
        return network_worker.measure(wanted.config, advance or workers.unseen)


def _row(measured: dict[str, Any], where: dict[str, Any]) -> dict[str, Any]:
    """The row of one method, from the seconds of all its turns."""
    step, compute, alone = (
        statistics.median(measured[key]) for key in ("steps", "computing", "communicating")
    )
    method = measured["method"]
    where = where | {key: measured[key] for key in ("machines", "transport", "load", "cores")}
    exposed = max(0.0, step - compute)
    return {
        "part": f"step {method}",
        "available": True,
        "detail": (
            f"{step:.4g} s per step: {compute:.4g} s of computing, {exposed:.4g} s of "
            f"communication that it does not hide ({alone:.4g} s alone)"
        ),
        "method": method,
        **where,
        "step_seconds": step,
        "compute_seconds": compute,
        "communication_seconds": alone,
        "exposed_seconds": exposed,
        "turn_seconds": measured["steps"],
    }


def _layers(numel: int) -> models.Shapes:
    """Square matrices of one size, and a vector for the rest."""
    side = math.isqrt(numel // _LAYERS)
    if side == 0:
        return ((numel,),)
    rest = numel - _LAYERS * side * side
    return (*[(side, side)] * _LAYERS, *([(rest,)] if rest else []))
