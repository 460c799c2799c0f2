"""One rank of `gradwire doctor --ranks N`; started by it on every node, or by torchrun."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.groups import communicator
from gradwire.transport.shm_handshake import machine_name
from gradwire_tools.bench import workers
from gradwire_tools.bench.network.network import StepConfig
from gradwire_tools.bench.train import methods

_ROWS = 64  # of a batch, per rank
_WARM_UP = 2  # DDP's buckets are rebuilt after the first step
_FEWEST = 3  # turns
_FORWARD = 1 / 3  # of a step's computing


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
        return _slowest(lambda: self.model(pause).backward())

    def _averaging(self) -> float:
        self._clear()
        loss = self.model(0.0)
        return _slowest(loss.backward)

    def _clear(self) -> None:
        self.model.zero_grad()
        for batch in self.model.module.batches:
            batch.grad = None


def _slowest(act: Callable[[], object]) -> float:
    """Seconds of the slowest rank; all begin together."""
    dist.barrier()
    begun = time.perf_counter()
    act()
    spent = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


def measure(config: StepConfig, advance: workers.Advance) -> list[dict[str, Any]]:
    """The seconds of every method's turns, in the group that exists; alike on all ranks.

    Methods take turns, in an order that rotates.
    """
    load = os.getloadavg()[0]  # of the minute before
    torch.manual_seed(dist.get_rank())
    of = [[make(shape) for shape in config.shapes] for make in (torch.zeros, torch.randn)]
    pause = config.compute_seconds
    entrants = [_Entrant(name, pause, _StandIn(*of)) for name in config.methods]
    for entrant in entrants:
        for _ in range(_WARM_UP):
            entrant.turn()
        for times in entrant.times.values():
            times.clear()
    where = _where(load)
    begun = time.monotonic()
    for turn in range(config.turns):
        advance(f"turns of {', '.join(config.methods)}", turn, config.turns)
        spent = torch.tensor(time.monotonic() - begun, dtype=torch.float32)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        if turn >= _FEWEST and float(spent) > config.budget_seconds:
            break
        first = turn % len(entrants)
        for entrant in entrants[first:] + entrants[:first]:
            entrant.turn()
    for entrant in entrants:
        entrant.applied.remove()
    return [{"method": entrant.name, **entrant.times, **where} for entrant in entrants]


def _where(load: float) -> dict[str, Any]:
    """The ranks' machines: how many, what carries gradwire's messages, and the busiest one's load
    and cores."""
    transport = communicator().transport
    own = machine_name(), getattr(transport, "name", type(transport).__name__)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (*own, load, os.cpu_count() or 1))
    machines, transports, loads, cores = zip(*found, strict=True)
    busiest = max(range(len(found)), key=lambda rank: float(loads[rank] / cores[rank]))
    names = {name for one in transports for name in one.split("+")}
    return {
        "machines": len(set(machines)), "transport": "+".join(sorted(names)),
        "load": round(loads[busiest], 2), "cores": cores[busiest],
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Measure, and on rank 0 report."""
    config, events = workers.configured(StepConfig, arguments)
    dist.init_process_group("gloo")
    events.rows(measure(config, events.progress))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
