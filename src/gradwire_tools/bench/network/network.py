"""`gradwire doctor --ranks N`: is the network the problem, and does compression pay?

The links between all ranks are measured; then one training step under DDP: with torch's fp32
all-reduce, with torch's fp16 hook, and with gradwire in bf16 and at 4 bits. The step has the
parameters of a given model. Its computing is a stand-in: a linear layer of each parameter's shape,
64 rows per rank; or a pause of given length, for a device that computes while the CPU is free. The
gradients live on the CPU and travel over gloo, or over shared memory where gradwire finds it.
Methods take turns; a turn begins with a step that is not timed. Seconds are those of the slowest
rank, and medians over turns.

A row per method: part ("step METHOD"), available, detail, method, ranks, net, numel, machines
(how many the ranks are on), transport (of gradwire's messages), and of the busiest machine cores,
others (the share of them that other processes took while the ranks rested, before or after the
turns) and load (processes that ran or waited for a core in the minute before, on average), and

    step_seconds            forward, backward and averaging
    compute_seconds         forward and backward without averaging
    communication_seconds   averaging alone, of gradients that cost nothing to compute
    exposed_seconds         step_seconds - compute_seconds: what computing does not hide
    turn_seconds            step_seconds of every turn

Rows before these and the last one have part, available, detail, and more by part:

    "network"    ranks, net, bandwidth and alpha (bits per second and seconds of latency, of the
                 slowest pair), slowest (its ranks), card (that carries it: the name of one,
                 "loopback", "shared memory", or null) and card_bits_per_s (null: not known)
    "computing"
    "kernels"    codec, kernel_seconds: to encode and decode in a step
    "verdict"    available (whether 4 bits surely pay), detail (lines of text: the verdict first,
                 the line to write last)

All rows have `run` (gradwire_tools.bench.provenance).
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.errors import ConfigError
from gradwire.groups import communicator, release
from gradwire_tools.bench import memory, workers
from gradwire_tools.bench.interleaved import slowest
from gradwire_tools.bench.network import network_verdict
from gradwire_tools.bench.network.surroundings import machines, others, slowest_link
from gradwire_tools.bench.network.world import World, started_by_torchrun
from gradwire_tools.bench.progress import progress
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.quantities import bandwidth, seconds
from gradwire_tools.bench.rows import Row, row_kind
from gradwire_tools.bench.train import methods
from gradwire_tools.lab import Network
from gradwire_tools.sim import models

_STEP = (
    "part:text available:flag detail:text method:text net:text ranks:positive numel:count "
    "step_seconds:amount compute_seconds:amount communication_seconds:amount "
    "exposed_seconds:amount turn_seconds:amounts"
)
_STEP_MORE = "machines:positive transport:text load:amount others:amount cores:positive"
_WHERE = ("machines", "transport", "load", "others", "cores")
_FACT = "available:flag detail:text"
_LINK = (
    "ranks:positive net:text card:text? card_bits_per_s:amount? bandwidth:amount alpha:amount "
    "slowest:integers"
)
_KERNELS = "codec:text numel:count kernel_seconds:amount"
KINDS = (
    row_kind("doctor", "available", f"{_FACT} {_LINK}", part="network"),
    row_kind("doctor", "available codec", f"{_FACT} {_KERNELS}", part="kernels"),
    row_kind("doctor", "part available method", _STEP, _STEP_MORE),
    row_kind("doctor", "part available step_seconds", _STEP),
    row_kind("doctor", "part available detail", f"part:text {_FACT}"),
)

METHODS = network_verdict.METHODS
NUMEL = 5_000_000
_LAYERS = 8
_ROWS = 64  # of a batch, per rank
_WARM_UP = 2  # DDP's buckets are rebuilt after the first step
_FEWEST = 3  # turns
_FORWARD = 1 / 3  # of a step's computing


def copies(methods: int) -> int:
    """Of the model that a rank holds at most: weights, temporaries, and each method's gradients and
    buckets."""
    return 2 + 2 * methods


@dataclass(frozen=True)
class MeasuredStep:
    """What every rank is told.

    Attributes:
        shapes: of the parameters.
        compute_seconds: of the pause that stands for computing; None computes linear layers.
        turns: of all methods, at most; `budget_seconds` may end them after three.
        surer: what would make the answer surer.
        timeout: seconds for ranks that are started here.
    """

    world: World
    shapes: models.Shapes
    compute_seconds: float | None
    methods: tuple[str, ...] = METHODS
    turns: int = 11
    budget_seconds: float = 60.0
    timeout: float = 600.0
    surer: tuple[str, ...] = ()

    def measured(self) -> list[Row]:
        """The links, and every method's seconds, on ranks that are started here or as one of
        torchrun's."""
        return workers.measured(self.world, self.timeout, measure, self)


def plan(
    ranks: int | None = None,
    net: str = "none",
    numel: int | None = None,
    model: str | None = None,
    compute: float | None = None,
    quick: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> MeasuredStep | None:
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
    surer = {
        "start it by torchrun on the real machines": not world.joins,
        "give --model, or --compute of your own step": model is None and compute is None,
        "leave --quick out": quick,
    }
    helps = tuple(how for how, would in surer.items() if would)
    step = MeasuredStep(world, shapes, compute, surer=helps)
    return replace(step, turns=5, budget_seconds=15.0) if quick else step


@stamped
def run(wanted: MeasuredStep) -> Iterator[Row]:
    """Yield the rows: network, computing, kernels, a row per method, and the verdict.

    Raises:
        ConfigError: this machine has no compiled kernels.
        WorkerError: a rank failed.
        TransportError: torchrun's ranks cannot be joined.
    """
    for name in wanted.methods:
        methods.parse(name).check()
    where: Row = {**wanted.world.keys, "numel": models.numel(wanted.shapes)}
    links, *measured = wanted.measured()
    rows = [_row(one, where) for one in measured]
    yield _fact("network", _told(links, where["net"]), **wanted.world.keys, **links)
    yield _fact("computing", network_verdict.computing(rows))
    took, numel = measured[-1]["kernels"], where["numel"]
    told = f"{seconds(took)} per step to encode and decode {numel:,} values at 4 bits"
    yield _fact("kernels", told, codec=network_verdict.OURS, numel=numel, kernel_seconds=took)
    yield from rows
    pays, text = network_verdict.verdict(rows, wanted.surer, links["bandwidth"])
    yield {"part": "verdict", "available": pays, "detail": text}


def _fact(part: str, detail: str, **known: Any) -> Row:
    return {"part": part, "available": True, "detail": detail, **known}


def _told(links: Row, net: str) -> str:
    """The slowest link, and what carries it."""
    (a, b), speed = links["slowest"], links["card_bits_per_s"]
    emulated = "" if net in ("none", "as it is") else " (emulated)"
    fast = "" if speed is None else f", a card of {bandwidth(speed)}"
    return (
        f"{bandwidth(links['bandwidth'])} and {seconds(links['alpha'])} of latency between ranks "
        f"{a} and {b}, the slowest pair, over {links['card'] or 'an unknown card'}{emulated}{fast}"
    )


def _row(measured: Row, where: Row) -> Row:
    """The row of one method, from the seconds of all its turns."""
    step, compute, alone = (
        statistics.median(measured[key]) for key in ("steps", "computing", "communicating")
    )
    method = measured["method"]
    where = where | {key: measured[key] for key in _WHERE}
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


# ---- one rank


class _Pause(torch.autograd.Function):
    """A layer whose gradient is given, and whose backward takes `seconds` and no CPU."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, seconds: float
    ) -> torch.Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        if ctx.seconds:
            time.sleep(ctx.seconds)
        return grad_outputs[0], ctx.gradient, None, None


class _StandIn(nn.Module):
    """A model of given weights; all methods share them, since nothing trains them.

    Its forward computes a linear layer for each, or pauses; pauses of 0 seconds cost nothing, and
    leave the averaging alone.
    """

    def __init__(self, weights: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(map(nn.Parameter, weights))
        self.gradients = gradients
        self.batches = [_batch(weight) for weight in self.weights]
        self.numel = sum(weight.numel() for weight in self.weights)

    def forward(self, pause: float | None) -> torch.Tensor:
        """The loss; `pause` is the seconds of a step's computing, None computes layers."""
        if pause is None:
            layers = zip(self.batches, self.weights, strict=True)
            return torch.stack([_layer(batch, weight).mean() for batch, weight in layers]).sum()
        time.sleep(_FORWARD * pause)
        value = torch.zeros((), dtype=torch.float32, requires_grad=True)
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            seconds = (1 - _FORWARD) * pause * weight.numel() / self.numel
            value = _Pause.apply(value, weight, gradient, seconds)  # type: ignore[no-untyped-call]
        return value


def _batch(weight: torch.Tensor) -> torch.Tensor:
    """What a layer is given, with a gradient of its own, as between the layers of a model."""
    columns = weight.flatten(1).shape[1] if weight.dim() > 1 else weight.numel()
    return torch.randn(_ROWS, columns, dtype=weight.dtype, requires_grad=True)


def _layer(batch: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return batch @ weight.flatten(1).T if weight.dim() > 1 else batch * weight


class _Entrant:
    """One method on a model of its own, and its seconds in all turns, of the slowest rank."""

    def __init__(self, name: str, pause: float | None, model: _StandIn) -> None:
        self.name, self.pause = name, pause
        method = methods.parse(name)
        self.model = method.distribute(model)
        self.applied = method.apply(self.model)
        self.times: dict[str, list[float]] = {"steps": [], "computing": [], "communicating": []}

    def turn(self) -> None:
        """A step that is not timed, since connections rest while others have their turns; a step;
        averaging alone; computing alone."""
        self._step(self.pause)
        self.times["steps"].append(self._step(self.pause))
        self.times["communicating"].append(self._averaging())
        with self.model.no_sync():
            self.times["computing"].append(self._step(self.pause))
        self._clear()  # the others' turns need the memory

    def _step(self, pause: float | None) -> float:
        self._clear()
        return slowest(lambda: self.model(pause).backward())

    def _averaging(self) -> float:
        self._clear()
        loss = self.model(0.0)
        return slowest(loss.backward)

    def _clear(self) -> None:
        self.model.zero_grad()
        for batch in self.model.module.batches:
            batch.grad = None


def measure(step: MeasuredStep) -> list[Row]:
    """What links and every method's turns take, in the group that exists; alike on all ranks.

    Methods take turns, in an order that rotates.
    """
    load, taken = os.getloadavg()[0], others()  # the load is of the minute before
    progress("links", 0, 1)
    comm = communicator()
    links = slowest_link(comm)
    torch.manual_seed(dist.get_rank())
    of = [[make(shape) for shape in step.shapes] for make in (torch.zeros, torch.randn)]
    pause = step.compute_seconds
    entrants = [_Entrant(name, pause, _StandIn(*of)) for name in step.methods]
    for entrant in entrants:
        for _ in range(_WARM_UP):
            entrant.turn()
        for times in entrant.times.values():
            times.clear()
    handle = entrants[-1].applied.handle
    assert handle is not None
    before = handle.stats()
    begun = time.monotonic()
    for turn in range(step.turns):
        progress(f"turns of {', '.join(step.methods)}", turn, step.turns)
        spent = torch.tensor(time.monotonic() - begun, dtype=torch.float32)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        if turn >= _FEWEST and float(spent) > step.budget_seconds:
            break
        first = turn % len(entrants)
        for entrant in entrants[first:] + entrants[:first]:
            entrant.turn()
    where, card = machines(comm, load, max(taken, others()))
    where["kernels"] = _kernel_seconds(before, handle.stats())
    for entrant in entrants:
        entrant.applied.remove()
    assert dist.group.WORLD is not None
    release(dist.group.WORLD)  # before rank 0, which has the store, may end
    return [links | card, *({"method": one.name, **one.times, **where} for one in entrants)]


def _kernel_seconds(before: Row, after: Row) -> float:
    """Of a step between two looks at a handle's totals, on the slowest rank."""
    spent, steps = (after[key] - before[key] for key in ("kernel_seconds", "steps"))
    mean = torch.tensor(spent / steps, dtype=torch.float64)
    dist.all_reduce(mean, op=dist.ReduceOp.MAX)
    return float(mean)
