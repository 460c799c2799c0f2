"""`gradwire bench collectives`: the cost of one all-reduce on an emulated network, per method.

Each method is a communication hook of a DDP module, as in training; the module is one matrix with a
given gradient. A barrier inside the hook starts the clock; it stops when the average is in place.
Methods are interleaved (A B A B), so that noise on the machine affects all of them equally. Each
turn begins with an untimed all-reduce: after a pause, TCP connections restart slowly, and training
has no such pauses.

A row: method, algorithm, transport, ranks, per_node, net, numel, seconds (of the slowest rank,
median over rounds), seconds_quartiles (over rounds), wire_bytes (sent by rank 0, including to ranks
of its own node), link_bytes (sent by all ranks of rank 0's node to other nodes; equal to wire_bytes
with one rank per node), limit_seconds (link_bytes / rate + rounds * latency; None without an
emulated network), of_limit (limit_seconds / seconds), nmse (against the average in float64). With
several ranks per node, link_bytes is the count of the node's network interface, which includes TCP
and Ethernet headers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire import algorithms
from gradwire.algorithms.hierarchical import Hierarchical
from gradwire.errors import ConfigError
from gradwire.groups import communicator
from gradwire_tools.bench import memory, workers
from gradwire_tools.bench.given import Weights, as_hook
from gradwire_tools.bench.interleaved import quartiles
from gradwire_tools.bench.network.world import World
from gradwire_tools.bench.progress import progress
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.rows import Row, row_kind
from gradwire_tools.bench.train import methods as method_table
from gradwire_tools.bench.train.method_run import interface_bytes

KINDS = (
    row_kind(
        "bench collectives",
        "method algorithm nmse limit_seconds",
        "method:text algorithm:text net:text ranks:positive numel:count seconds:amount "
        "wire_bytes:amount limit_seconds:amount? of_limit:amount? nmse:amount?",
        "transport:text per_node:positive? seconds_quartiles:spread? link_bytes:amount?",
    ),
)

DEFAULT_METHODS = (
    "torch-fp32", "torch-fp16-hook", "torch-bf16-hook", "torch-powersgd", "bf16", "qsgd:bits=4",
)  # fmt: skip
_TIMEOUT_S = 1200.0
_SAMPLE = 1 << 20  # values whose error is measured
_WARM_UP = 3  # torch's PowerSGD sends its first two uncompressed


@stamped
def run(
    ranks: int = 4,
    net: str = "1gbit,1ms",
    methods: Sequence[str] | None = None,
    codecs: Sequence[str] | None = None,
    numel: int | None = None,
    quick: bool = False,
    per_node: int = 1,
) -> Iterator[Row]:
    """Yield the rows.

    Args:
        ranks: number of ranks.
        net: RATE,LATENCY or none.
        methods: names as in `bench train`; by default torch's four, and gradwire's bf16 and 4 bits.
        codecs: instead of methods, these codecs of gradwire at their defaults.
        numel: values of the gradient; 25 million, or 2.5 million if `quick`.
        quick: end within 45 seconds on two idle cores, unless the network is slow.
        per_node: ranks per node; they share its link and communicate through memory.

    Raises:
        ConfigError: an unknown method, codec or option, a number out of range, an impossible
            network, or no lab on this machine.
        WorkerError: a rank failed.
    """
    names = [*(methods or []), *(f"gradwire:{codec}" for codec in codecs or [])]
    for name in names:
        method_table.parse(name).check()
    if numel is not None and numel < 1:
        raise ConfigError(f"--numel {numel}: a gradient has 1 value or more")
    if numel is not None:
        memory.check(f"--numel {numel} of {ranks} ranks", 4 * numel * ranks * 3)
    world = World.here(ranks, net, per_node)
    given = names or DEFAULT_METHODS, numel or (2_500_000 if quick else 25_000_000)
    yield from workers.measured(world, _TIMEOUT_S, measure, world, *given, 5 if quick else 9)


# ---- one rank


def measure(world: World, methods: Sequence[str], numel: int, rounds: int) -> list[Row]:
    """A row for each method; all take turns."""
    timed_methods = [_TimedMethod(name, numel) for name in methods]
    gradient = _gradient_of(dist.get_rank(), numel)
    for turn in range(turns := _WARM_UP + rounds):
        progress(f"turns of {', '.join(methods)}", turn, turns)
        for timed_method in timed_methods:
            if len(timed_methods) > 1:
                timed_method.step(gradient, counts=False)
            timed_method.step(gradient, counts=turn >= _WARM_UP)
    parts = [sampled(_gradient_of(r, numel)) for r in range(dist.get_world_size())]
    expected = torch.stack(parts).mean(0)
    return [timed_method.row(expected, world) for timed_method in timed_methods]


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

        super().register_comm_hook(state, as_hook(timed))


class _TimedMethod:
    """One method on its own module."""

    def __init__(self, name: str, numel: int) -> None:
        self.name = name
        self.method = method_table.parse(name)
        side = max(d for d in range(1, int(numel**0.5) + 1) if numel % d == 0)
        weights = Weights([(side, numel // side)])  # as square as the divisors of numel allow
        (self.weight,) = weights.parameters()
        self.model = _TimedDDP(weights, gradient_as_bucket_view=True, init_sync=False)
        self.applied = self.method.apply(self.model)
        if self.method.kind == "torch_fp32":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            self.model.register_comm_hook(None, default_hooks.allreduce_hook)
        self.seconds: list[float] = []
        self.sent = self.link_sent = 0  # in the last step
        self.steps = 0

    def step(self, gradient: torch.Tensor, counts: bool) -> None:
        self.model.zero_grad(set_to_none=False)
        sent, on_link = self.applied.traffic(self.steps)["wire_bytes"], interface_bytes() or 0
        self.model()
        self.weight.backward(gradient.view_as(self.weight))
        self.steps += 1
        self.sent = self.applied.traffic(self.steps)["wire_bytes"] - sent
        self.link_sent = (interface_bytes() or 0) - on_link
        slowest = torch.tensor(self.model.seconds, dtype=torch.float32)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if counts:
            self.seconds.append(float(slowest))

    def row(self, expected: torch.Tensor, world: World) -> Row:
        assert self.weight.grad is not None
        found = sampled(self.weight.grad.view(-1))
        ours = self.method.kind == "gradwire"
        algorithm = str(self.method.options.get("algorithm", "sra")) if ours else "ring"
        transport = communicator().transport if ours else None
        named = getattr(transport, "name", type(transport).__name__)
        reductions = 2 if self.method.kind == "torch_powersgd" else 1
        seconds, network = statistics.median(self.seconds), world.network
        link_bytes, limit = self.link_sent if world.per_node > 1 else self.sent, None
        if network.shaped:
            rounds = reductions * _rounds(algorithm, world)
            limit = link_bytes * 8 / network.rate_bits_per_s + rounds * network.latency_s
        return {
            "method": self.name,
            "algorithm": algorithm,
            "transport": named if ours else "gloo",
            "numel": self.weight.numel(),
            "seconds": seconds,
            "seconds_quartiles": quartiles(self.seconds),
            "wire_bytes": self.sent,
            "link_bytes": link_bytes,
            "limit_seconds": limit,
            "of_limit": None if limit is None else limit / seconds,
            "nmse": float((found - expected).square().sum() / expected.square().sum()),
            "per_node": world.per_node,
            **world.keys,
        }


def _rounds(algorithm: str, world: World) -> int:
    """The rounds between nodes."""
    if algorithm == "hierarchical":
        nodes = tuple(rank // world.per_node for rank in range(world.count))
        return Hierarchical(nodes=nodes).rounds_between(world.count)
    return algorithms.get(algorithm).rounds(world.count)


def sampled(values: torch.Tensor) -> torch.Tensor:
    """At most `_SAMPLE` values, from all of a gradient, whose scale varies along it."""
    return values[:: -(-values.numel() // _SAMPLE)].double()


def _gradient_of(rank: int, numel: int) -> torch.Tensor:
    """The gradient of `rank`: normal values, with a scale that varies as between layers."""
    generator = torch.Generator().manual_seed(1000 + rank)
    values = torch.randn(numel, generator=generator, dtype=torch.float32)
    return values.mul_(torch.linspace(0.1, 1.0, numel, dtype=torch.float32))
