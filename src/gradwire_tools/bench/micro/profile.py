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

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.collectives import AVERAGE
from gradwire.collectives.compile import Capabilities, compile
from gradwire.engine import Timeline
from gradwire.engine.topology import Topology
from gradwire.engine.trace import WIRE, Span
from gradwire.errors import ConfigError
from gradwire.groups import communicator
from gradwire.handles.buckets import Buckets
from gradwire.handles.hook import hook_state
from gradwire_tools.bench import memory, workers
from gradwire_tools.bench.given import Weights
from gradwire_tools.bench.network.world import World
from gradwire_tools.bench.progress import progress
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.rows import row_kind
from gradwire_tools.bench.train.methods import attach, parse
from gradwire_tools.sim import Net, Scenario

KINDS = (
    row_kind(
        "bench profile",
        "method part seconds",
        "method:text part:text net:text seconds:amount ranks:positive numel:count",
        "steps:count",
    ),
)

_TIMEOUT_S = 300.0
_COMPILATIONS = 9
_PARAMETERS = 30
_WARM_UP = 3  # DDP's buckets are rebuilt after the first step
_SLEPT_S = 50e-6  # longer than a wake-up
_THREADS = ("compute", "inbound", "outbound")
_COUNTED = ("kernel_seconds", "kernel_calls", "seconds")  # by the handle


@stamped
def run(
    ranks: int = 2,
    net: str = "none",
    methods: Sequence[str] | None = None,
    numel: int | None = None,
    bucket_mb: float | None = None,
    trace: str | None = None,
    quick: bool = False,
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

    Raises:
        ConfigError: a method that is not gradwire's, a size out of range, an impossible network, or
            no lab on this machine.
        WorkerError: a rank failed.
    """
    names = tuple(methods or ("qsgd:bits=4",))
    for name in names:
        method = parse(name)
        if method.kind != "gradwire":
            raise ConfigError(f"method {name!r}: only gradwire's own methods can be profiled")
        method.how()  # refuses aggregators, whose buckets take several collectives
    if numel is not None and numel < _PARAMETERS:
        raise ConfigError(f"--numel {numel}: give {_PARAMETERS} or more, one per parameter")
    if bucket_mb is not None and not bucket_mb > 0:
        raise ConfigError(f"--bucket-mb {bucket_mb:g}: a bucket holds more than 0 MB")
    values, steps = numel or 6_553_600, 10 if quick else 40
    memory.check(f"{values} values of {ranks} ranks", 4 * values * ranks * 3)
    world = World.here(ranks, net)
    given = names, _shapes(values), bucket_mb or 1000.0, steps, trace
    rows = [{**row, **world.keys} for row in workers.measured(world, _TIMEOUT_S, measure, *given)]
    yield from rows
    for row in {row["method"]: row for row in rows}.values():
        yield {**row, "part": "compile_1024", "seconds": _compile_s(row), "steps": _COMPILATIONS}


def _shapes(numel: int) -> tuple[tuple[int, ...], ...]:
    """Alternating vectors and matrices, of some `numel` values together."""
    side = int((numel / (_PARAMETERS / 2)) ** 0.5)
    return tuple((side, side) if i % 2 else (side,) for i in range(_PARAMETERS))


def _compile_s(row: Mapping[str, Any]) -> float:
    """Median seconds of compiling a row's bucket for rank 0 of 1024."""
    codec, options = parse(row["method"]).how()
    scenario = Scenario(1024, Net("none"), codec, _shapes(row["numel"]), coalesce_bytes=1 << 40)
    ((specs,),) = ([part.specs for (part,) in scope.rounds] for scope in scenario.scopes)
    topology = Topology(0, 1024, tuple(rank // 8 for rank in range(1024)))
    seconds = []
    for _ in range(_COMPILATIONS):
        begun = time.perf_counter()
        graph = compile(AVERAGE, specs, topology, Capabilities(), options).graph
        _ = graph.slots, graph.opening, graph.dependents  # cached properties of a program
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


# ---- one rank


def measure(
    methods: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    bucket_mb: float,
    steps: int,
    trace_file: str | None,
) -> list[dict[str, Any]]:
    """The rows of all methods, each of which steps a model of its own.

    Args:
        trace_file: for a step's trace.
    """
    torch.set_num_threads(1)  # thread clocks do not count a kernel's helper threads
    rows: list[dict[str, Any]] = []
    for name in methods:
        model = DistributedDataParallel(Weights(shapes), bucket_cap_mb=bucket_mb)
        handle = attach(model, parse(name).options)
        gradients = [torch.ones_like(weight) for weight in model.parameters()]
        comm = communicator()
        trace = comm.runs.begin_trace()
        for _ in range(_WARM_UP):
            _step(model, gradients, handle, trace)
        found = []
        for step in range(steps):
            progress(f"steps of {name}", step, steps)
            found.append(_step(model, gradients, handle, trace))
        comm.runs.end_trace()
        if comm.rank == 0 and trace_file is not None:
            Path(trace_file).write_text(json.dumps(trace.chrome(comm.rank)))
        handle.detach()
        rows += [
            {
                "method": name,
                "part": part,
                "seconds": statistics.median(parts[part][0] for parts in found),
                "steps": statistics.median_low(parts[part][1] for parts in found),
                "transport": getattr(comm.transport, "name", type(comm.transport).__name__),
                "numel": sum(weight.numel() for weight in gradients),
                "parameters": len(gradients),
                "bucket_mb": bucket_mb,
            }
            for part in found[0]
        ]
    return rows


def _step(
    model: DistributedDataParallel,
    gradients: Sequence[torch.Tensor],
    handle: gradwire.Handle,
    trace: Timeline,
) -> dict[str, Any]:
    """One backward pass: part -> (seconds, how often)."""
    hook: list[float] = []
    buckets = hook_state(model).reducer
    assert isinstance(buckets, Buckets)
    reduce = type(buckets).reduce

    def timed(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        begun = time.thread_time()
        future = reduce(buckets, bucket)
        hook.append(time.thread_time() - begun)
        return future

    buckets.reduce = timed  # type: ignore[method-assign]
    before = handle.stats()
    trace.clear()
    model()
    begun = time.perf_counter()
    torch.autograd.backward(list(model.parameters()), gradients)
    backward = time.perf_counter() - begun
    after = handle.stats()
    kernels, calls, bucket = (after[name] - before[name] for name in _COUNTED)
    spans = list(trace.spans)
    parts = {"hook": (sum(hook), len(hook))}
    wire = [s for s in spans if s.what.startswith(WIRE)]
    for name in _THREADS:
        own = [s for s in spans if s.thread == name and s not in wire]
        inside = sum(s.cpu_seconds for s in wire if s.thread == name)
        parts[name] = (sum(s.cpu_seconds for s in own) - inside, len(own))
    compute, count = parts["compute"]
    parts["compute"] = (compute - kernels, count)
    parts["python"] = (sum(seconds for seconds, _ in parts.values()), 1)
    late = [s for s in spans if s.queued_seconds and not _had_to_wait(s, wire)]
    parts["queueing"] = (sum(s.queued_seconds for s in late), len(late))
    parts["wire"] = (sum(s.seconds for s in wire), len(wire))
    parts["kernels"] = (kernels, calls)
    parts["bucket"] = (bucket, len(hook))
    if len(hook) == 1:
        parts["overhead"] = (bucket - kernels, 1)
    parts["backward"] = (backward, 1)
    return parts


def _had_to_wait(span: Span, wire: list[Span]) -> bool:
    """Whether a step slept in the transport: then its late start cost no time."""
    own = (w for w in wire if w.thread == span.thread)
    end = span.begin + span.seconds
    inside = (w for w in own if span.begin <= w.begin and w.begin + w.seconds <= end)
    return any(w.seconds - w.cpu_seconds > _SLEPT_S for w in inside)
