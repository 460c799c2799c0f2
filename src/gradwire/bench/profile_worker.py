"""One rank of `gradwire bench profile`, which starts it."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.bench import methods, workers
from gradwire.bench.profile import Config
from gradwire.engine import Timeline
from gradwire.engine.trace import WIRE, Span
from gradwire.groups import communicator
from gradwire.integrations.buckets import Buckets
from gradwire.integrations.hook import hook_state

_WARM_UP = 3  # DDP's buckets are rebuilt after the first step
_SLEPT_S = 50e-6  # longer than a wake-up
_THREADS = ("compute", "inbound", "outbound")


class _Layers(torch.nn.Module):
    """Alternating matrices and biases; the loss is their sum, whose gradient costs almost
    nothing."""

    def __init__(self, numel: int, parameters: int) -> None:
        super().__init__()
        side = int((numel / (parameters / 2)) ** 0.5)
        self.layers = torch.nn.ParameterList(
            torch.zeros(side, side) if i % 2 else torch.zeros(side) for i in range(parameters)
        )

    def forward(self) -> torch.Tensor:
        return torch.stack([p.sum() for p in self.layers]).sum()


def _step(
    model: DistributedDataParallel, handle: gradwire.Handle, trace: Timeline
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
    loss = model()
    begun = time.perf_counter()
    loss.backward()
    backward = time.perf_counter() - begun
    after = handle.stats()
    spans = list(trace.spans)
    parts = {"hook": (sum(hook), len(hook))}
    wire = [s for s in spans if s.what.startswith(WIRE)]
    for name in _THREADS:
        own = [s for s in spans if s.thread == name and s not in wire]
        inside = sum(s.cpu_seconds for s in wire if s.thread == name)
        parts[name] = (sum(s.cpu_seconds for s in own) - inside, len(own))
    kernels = after["kernel_seconds"] - before["kernel_seconds"]
    compute, count = parts["compute"]
    parts["compute"] = (compute - kernels, count)
    bucket = after["seconds"] - before["seconds"]
    parts["python"] = (sum(seconds for seconds, _ in parts.values()), 1)
    late = [s for s in spans if s.queued_seconds and not _had_to_wait(s, wire)]
    parts["queueing"] = (sum(s.queued_seconds for s in late), len(late))
    parts["wire"] = (sum(s.seconds for s in wire), len(wire))
    calls = after["kernel_calls"] - before["kernel_calls"]
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


def _profile(name: str, config: Config, events: workers.Events) -> list[dict[str, Any]]:
    """The rows of one method."""
    layers = _Layers(config.numel, config.parameters)
    model = DistributedDataParallel(layers, bucket_cap_mb=config.bucket_mb)
    handle = methods.attach(model, methods.parse(name).options)
    for _ in range(_WARM_UP):
        model().backward()
    comm = communicator()
    trace = comm.in_flight.begin_trace()
    steps = []
    for step in range(config.steps):
        events.progress(f"steps of {name}", step, config.steps)
        steps.append(_step(model, handle, trace))
    comm.in_flight.end_trace()
    if comm.rank == 0 and config.trace is not None:
        Path(config.trace).write_text(json.dumps(trace.chrome(comm.rank)))
    handle.detach()
    return [
        {
            "method": name,
            "part": part,
            "seconds": statistics.median(step[part][0] for step in steps),
            "steps": statistics.median_low(step[part][1] for step in steps),
            "transport": getattr(comm.transport, "name", type(comm.transport).__name__),
            "numel": sum(p.numel() for p in model.parameters()),
            "parameters": config.parameters,
            "bucket_mb": config.bucket_mb,
        }
        for part in steps[0]
    ]


def main(arguments: list[str]) -> None:
    """Step a model for each method; rank 0 reports the rows."""
    config, events = workers.configured(Config, arguments)
    torch.set_num_threads(1)  # thread clocks do not count a kernel's helper threads
    dist.init_process_group("gloo")
    rows = [row for name in config.methods for row in _profile(name, config, events)]
    events.rows(rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
