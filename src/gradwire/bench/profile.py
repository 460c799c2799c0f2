"""`gradwire bench profile`: what gradwire costs a DDP bucket beyond its kernels and the wire.

A DDP module of 30 parameters, 25 MB in all, in one bucket unless told otherwise. The group's lanes
record what they do. Everything is counted on rank 0, in its threads' own CPU time, so that
ranks that share cores do not count twice; medians over steps.

A row: method, part, seconds (of all buckets), steps (how often); with ranks, net, transport, numel,
parameters, bucket_mb. Parts:

    hook        DDP's own thread, until the bucket is handed over
    compute     the compute lane's Python: tables of addresses, scheduling
    inbound     the inbound lanes' Python, and over a network the checksums of what came
    outbound    the outbound lanes' Python
    python      these four together
    queueing    steps that lay ready while their thread slept (wall clock), all threads together;
                but not waits for messages that were still on their way when they began
    wire        posting messages and waiting for them (wall clock), all threads together
    kernels     kernels, and over a network the checksums of what is sent
    bucket      from the hook's call to the average in place (wall clock); several overlap
    overhead    of one bucket: bucket less kernels, so all that is not hidden beside them, the
                wire's time too
    backward    the whole backward pass (wall clock)
    compile_1024    compiling one such bucket for one of 1024 ranks, 8 to a machine (wall clock)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.bench import memory, workers
from gradwire.bench.methods import parse
from gradwire.collectives import AVERAGE
from gradwire.collectives.compile import Capabilities, CollectiveLayout, compile
from gradwire.engine.topology import Topology
from gradwire.errors import ConfigError
from gradwire.lab import Network
from gradwire.sim.buckets import buckets

_TIMEOUT_S = 300.0
_COMPILED = 9  # times
_PARAMETERS = 30


@dataclass(frozen=True)
class Config:
    """What the ranks are told; `trace` is the file for one step's."""

    methods: tuple[str, ...]
    numel: int
    parameters: int
    bucket_mb: float
    steps: int
    trace: str | None


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
        ranks: one a node.
        net: RATE,LATENCY or none.
        methods: of gradwire, named as in `bench train`; by default 4 bits.
        numel: values of the gradient; by default 6 553 600, 25 MB in fp32.
        bucket_mb: DDP's bucket_cap_mb; by default one bucket.
        trace: file for the last step of rank 0, as chrome://tracing reads it.
        quick: fewer steps.
        advance: is called with every step.

    Raises:
        ConfigError: a method that is not gradwire's, a size that is none, an impossible network, or
            no lab on this machine.
        WorkerError: a rank failed.
    """
    network = Network.parse(net)
    names = tuple(methods or ("gradwire-qsgd4",))
    for name in names:
        method = parse(name)
        if method.kind != "gradwire":
            raise ConfigError(f"method {name!r}: this profile is of gradwire's own methods")
        method.how()  # an aggregator of several collectives is no one bucket
    if ranks < 2:
        raise ConfigError(f"--ranks {ranks}: one rank sends nothing; use 2 ranks or more")
    if numel is not None and numel < _PARAMETERS:
        raise ConfigError(f"--numel {numel}: {_PARAMETERS} parameters have as many values or more")
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
        yield {**row, "part": "compile_1024", "seconds": _compile_s(row), "steps": _COMPILED}


def _compile_s(row: Mapping[str, Any]) -> float:
    """Median seconds of compiling the bucket of a row for rank 0 of 1024."""
    codec, options = parse(row["method"]).how()
    side = int((row["numel"] / row["parameters"] * 2) ** 0.5)
    shapes = tuple((side, side) if i % 2 else (side,) for i in range(row["parameters"]))
    specs = tuple(spec for bucket in buckets(shapes, codec, False, 1024) for spec in bucket)
    layout = CollectiveLayout(AVERAGE, specs)
    topology = Topology(0, 1024, tuple(rank // 8 for rank in range(1024)))
    seconds = []
    for _ in range(_COMPILED):
        begun = time.perf_counter()
        graph = compile(layout, topology, Capabilities(), options).graph
        _ = graph.slots, graph.opening, graph.dependents  # which are found at a program's first run
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)
