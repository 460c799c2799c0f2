"""One rank of `gradwire bench collectives`, which starts it."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire import algorithms
from gradwire.algorithms.hierarchical import Hierarchical
from gradwire.bench import methods as method_table
from gradwire.bench import workers
from gradwire.bench.collectives import Config
from gradwire.bench.interleaved import quartiles
from gradwire.groups import communicator
from gradwire.transport import Mixed

_SAMPLE = 1 << 20  # values whose error is measured
_WARM_UP = 3  # torch's PowerSGD sends its first two uncompressed


class _GivenGradient(torch.autograd.Function):
    """A loss with a given gradient, at no cost."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None


class _Matrix(torch.nn.Module):
    """A model of one matrix of `numel` values, as square as its divisors allow."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        side = max(d for d in range(1, int(numel**0.5) + 1) if numel % d == 0)
        self.weight = torch.nn.Parameter(torch.zeros(side, numel // side))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        apply: Any = _GivenGradient.apply
        loss: torch.Tensor = apply(self.weight, gradient)
        return loss


class _TimedDDP(DistributedDataParallel):
    """DDP that times its communication hook."""

    seconds = 0.0

    def register_comm_hook(self, state: object, hook: Any) -> None:
        def timed(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            dist.barrier()
            begun = time.perf_counter()
            future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
            future.wait()
            self.seconds = time.perf_counter() - begun
            return future

        timed.__annotations__ = {
            "bucket": dist.GradBucket,
            "return": torch.futures.Future[torch.Tensor],
        }
        super().register_comm_hook(state, timed)


class _TimedMethod:
    """One method on its own module."""

    def __init__(self, name: str, numel: int) -> None:
        self.name = name
        self.method = method_table.parse(name)
        self.model = _TimedDDP(_Matrix(numel), gradient_as_bucket_view=True, init_sync=False)
        self.applied = self.method.apply(self.model)
        if self.method.kind == "torch_fp32":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            self.model.register_comm_hook(None, default_hooks.allreduce_hook)
        self.seconds: list[float] = []
        self.sent: list[int] = []
        self.link_sent: list[int] = []
        self.steps = 0

    def step(self, gradient: torch.Tensor, counts: bool) -> None:
        self.model.zero_grad(set_to_none=False)
        before = _link_bytes()
        self.model(gradient).backward()
        self.steps += 1
        self.sent.append(self.applied.traffic(self.steps).wire_bytes)
        self.link_sent.append(_link_bytes() - before)
        slowest = torch.tensor(self.model.seconds)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if counts:
            self.seconds.append(float(slowest))

    def row(self, expected: torch.Tensor, per_node: int) -> dict[str, Any]:
        weight = self.model.module.weight
        found = weight.grad.view(-1)[: expected.numel()].double()
        ours = self.method.kind == "gradwire"
        algorithm = str(self.method.options.get("algorithm", "sra")) if ours else "ring"
        reductions = 2 if self.method.kind == "torch_powersgd" else 1
        return {
            "method": self.name,
            "algorithm": algorithm,
            "transport": _transport() if ours else "gloo",
            "numel": weight.numel(),
            "seconds": statistics.median(self.seconds),
            "seconds_quartiles": quartiles(self.seconds),
            "wire_bytes": self.sent[-1] - self.sent[-2],
            "link_bytes": self.link_sent[-1] if per_node > 1 else self.sent[-1] - self.sent[-2],
            "rounds": reductions * _rounds(algorithm, per_node),
            "nmse": float((found - expected).square().sum() / expected.square().sum()),
        }


def _rounds(algorithm: str, per_node: int) -> int:
    """The rounds between nodes."""
    size = dist.get_world_size()
    if algorithm == "hierarchical":
        nodes = tuple(rank // per_node for rank in range(size))
        return Hierarchical(nodes=nodes).rounds_between(size)
    return algorithms.get(algorithm).rounds(size)


def _link_bytes() -> int:
    """Bytes that this node's interface has sent; 0 if the node has no interface of its own."""
    with open("/proc/net/dev") as file:
        lines = [line.split(":") for line in file if line.strip().startswith("eth0:")]
    return int(lines[0][1].split()[8]) if lines else 0


def _transport() -> str:
    """The name of gradwire's transport."""
    transport = communicator().transport
    return transport.name if isinstance(transport, Mixed) else type(transport).__name__


def gradient_of(rank: int, numel: int) -> torch.Tensor:
    """The gradient of `rank`: normal values, with a scale that varies as between layers."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1000 + rank))
    return values.mul_(torch.linspace(0.1, 1.0, numel))


def main(arguments: list[str]) -> None:
    """Run all methods; rank 0 reports their rows."""
    config, events = workers.configured(Config, arguments)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    timed_methods = [_TimedMethod(name, config.numel) for name in config.methods]
    weight = timed_methods[0].model.module.weight
    gradients = gradient_of(rank, weight.numel()).view_as(weight)
    turns = _WARM_UP + config.rounds
    for turn in range(turns):
        events.progress(f"turns of {', '.join(config.methods)}", turn, turns)
        for timed_method in timed_methods:
            if len(timed_methods) > 1:
                timed_method.step(gradients, counts=False)
            timed_method.step(gradients, counts=turn >= _WARM_UP)
    sample = min(_SAMPLE, weight.numel())
    parts = [gradient_of(r, weight.numel())[:sample].double() for r in range(world_size)]
    expected = torch.stack(parts).mean(0)
    events.rows([timed_method.row(expected, config.per_node) for timed_method in timed_methods])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
