"""`gradwire bench profile`: the overhead of a DDP bucket beyond its kernels and the wire.

The model is a DDP module of 30 parameters, 25 MB in all, by default in one bucket. The engine's
threads are traced. All times are from rank 0. They are CPU time of its threads unless marked as
wall clock, so that time lost to ranks that share the cores does not count. Medians over steps.

A row: method, part, seconds (of all buckets), steps (how often); with ranks, net, transport, numel,
parameters, bucket_mb. Parts:

    hook        DDP's own thread, until the bucket is submitted
    compute     Python on the compute thread: address tables, scheduling
    inbound     Python on the inbound threads; over a network, also checksums of received messages
    outbound    Python on the outbound threads
    python      the sum of these four
    queueing    time that ready steps waited for their thread (wall clock), all threads together;
                without waits for messages that were still in flight
    wire        posting messages and waiting for them (wall clock), all threads together
    kernels     kernels; over a network, also checksums of sent messages
    bucket      from the hook's call until the average is in place (wall clock); buckets overlap
    overhead    of a single bucket: bucket - kernels, which includes the wire's time
    backward    the whole backward pass (wall clock)
    compile_1024    compiling such a bucket for one of 1024 ranks, 8 per node (wall clock)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.bench import memory, workers
from gradwire.bench.methods import parse
from gradwire.bench.provenance import stamped
from gradwire.collectives import AVERAGE
from gradwire.collectives.compile import Capabilities, CollectiveLayout, compile
from gradwire.engine.topology import Topology
from gradwire.errors import ConfigError
from gradwire.lab import Network
from gradwire.sim.buckets import ddp_buckets

_TIMEOUT_S = 300.0
_COMPILATIONS = 9
_PARAMETERS = 30


@dataclass(frozen=True)
class Config:
    """The workers' arguments; `trace` is the file for a step's trace."""

    methods: tuple[str, ...]
    numel: int
    parameters: int
    bucket_mb: float
    steps: int
    trace: str | None


@stamped
def run(
    ranks: int = 2,
    net: str = "none",
    methods: Sequence[str] | None = None,
    numel: int | None = None,
    bucket_mb: float | None = None,
    trace: str | None = None,
    quick: bool = False,
    advance: workers.Advance | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the rows.

    Args:
        ranks: number of ranks, one per node.
        net: RATE,LATENCY or none.
        methods: gradwire's methods, named as in `bench train`; by default 4 bits.
        numel: values of the gradient; by default 6 553 600, 25 MB in fp32.
        bucket_mb: DDP's bucket_cap_mb; by default one bucket.
        trace: file for the trace of rank 0's last step, in the format of chrome://tracing.
        quick: fewer steps.
        advance: is called with every step.

    Raises:
        ConfigError: a method that is not gradwire's, a size out of range, an impossible network, or
            no lab on this machine.
        WorkerError: a rank failed.
    """
    network = Network.parse(net)
    names = tuple(methods or ("gradwire-qsgd4",))
    for name in names:
        method = parse(name)
        if method.kind != "gradwire":
            raise ConfigError(f"method {name!r}: only gradwire's own methods can be profiled")
        method.how()  # refuses aggregators, whose buckets take several collectives
    if ranks < 2:
        raise ConfigError(f"--ranks {ranks}: one rank sends nothing; use 2 ranks or more")
    if numel is not None and numel < _PARAMETERS:
        raise ConfigError(f"--numel {numel}: give {_PARAMETERS} or more, one per parameter")
    if bucket_mb is not None and not bucket_mb > 0:
        raise ConfigError(f"--bucket-mb {bucket_mb:g}: a bucket holds more than 0 MB")
    values, steps = numel or 6_553_600, 10 if quick else 40
    memory.check(f"{values} values of {ranks} ranks", 4 * values * ranks * 3)
    config = Config(names, values, _PARAMETERS, bucket_mb or 1000.0, steps, trace)
    worker = "gradwire.bench.profile_worker"
    where = {"ranks": ranks, "net": str(network)}
    found = workers.rows(worker, config, ranks, network, _TIMEOUT_S, advance)
    rows = [{**row, **where} for row in found]
    yield from rows
    for row in {row["method"]: row for row in rows}.values():
        yield {**row, "part": "compile_1024", "seconds": _compile_s(row), "steps": _COMPILATIONS}


def _compile_s(row: Mapping[str, Any]) -> float:
    """Median seconds of compiling a row's bucket for rank 0 of 1024."""
    codec, options = parse(row["method"]).how()
    side = int((row["numel"] / row["parameters"] * 2) ** 0.5)
    shapes = tuple((side, side) if i % 2 else (side,) for i in range(row["parameters"]))
    specs = tuple(spec for bucket in ddp_buckets(shapes, codec, False, 1024) for spec in bucket)
    layout = CollectiveLayout(AVERAGE, specs)
    topology = Topology(0, 1024, tuple(rank // 8 for rank in range(1024)))
    seconds = []
    for _ in range(_COMPILATIONS):
        begun = time.perf_counter()
        graph = compile(layout, topology, Capabilities(), options).graph
        _ = graph.slots, graph.opening, graph.dependents  # cached properties of a program
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)
