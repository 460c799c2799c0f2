"""Measures this machine for `gradwire sim`: the kernels' curves and the engine's overheads.

Kernels as in gradwire/planner/kernel_costs.py. Aggregators run on random square matrices, where
nothing is sent. The engine is measured between two ranks of this
machine over gloo: posting, latency, processor time per byte, and the time of a tiny all-reduce
beyond the simulated time. The results are kept in the user's cache.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

import gradwire
from gradwire.aggregators import Aggregator, Attached, registry, rounds_of
from gradwire.codecs import Identity, name_of
from gradwire.collectives import AllReduce, Options
from gradwire.engine import HEADER_BYTES, Communicator
from gradwire.engine.message import Envelope, check, seal
from gradwire.lang import Codec, rng
from gradwire.planner import kernel_costs
from gradwire.transport import TorchP2P
from gradwire_tools.bench import interleaved, workers
from gradwire_tools.bench.network.transports import one_way, round_trips
from gradwire_tools.bench.network.world import World
from gradwire_tools.bench.progress import progress
from gradwire_tools.sim import Curves, curves
from gradwire_tools.sim.buckets import STEADY
from gradwire_tools.sim.calibrate import SEGMENTS, VALUES, engine
from gradwire_tools.sim.curves import Curve

_TIMEOUT_S = 120.0
_POSTS = 64
_STREAM = 12  # messages of 4 MB
_TAGS = 1 << 10
_TURNS = 5
_SIDES = (64, 128, 256, 512, 1024)  # of matrices that aggregators average
_WORLDS = (2, 8)
_VALUES = 1 << 22  # of a scope: more than caches hold
_ROUNDS = 200
# The shares of a link's rate that TCP gets in the lab, with one busy connection and with several,
# and the seconds that several lose at first (docs/laboratory/simulator.md). They are constants
# because not every machine has a lab.
_GOODPUT = {"goodput": 0.985, "shared": 0.965, "settling": 0.003}


def measured(
    methods: Iterable[Codec | Aggregator],
    threads: int = 1,
    fresh: bool = False,
) -> Curves:
    """The curves of these codecs and aggregators, and of Identity, on this machine.

    Args:
        threads: threads per kernel.
        fresh: ignore cached results.

    Raises:
        WorkerError: a rank that measures the engine failed.
    """
    wanted = {registry.get(one).recorded(): one for one in [*methods, Identity()]}
    file = kernel_costs.file(threads)

    def costs(of: Sequence[Codec]) -> dict[str, dict[str, Curve]]:
        found = {}
        for index, codec in enumerate(of):
            progress(f"kernels of {name_of(codec)}", index, len(of))
            found[repr(codec)] = kernel_costs.kernel_curves(codec, threads)
        return found

    if fresh or not file.exists():
        kernels = Curves(kernel_costs.processor(), threads, costs([Identity()]))
        (overheads,) = workers.measured(World.here(2, "none"), _TIMEOUT_S, measure)
        known = engine(kernels, overheads)
    else:
        known = curves.load(file)
    missing = [o for name, o in wanted.items() if name not in {**known.codecs, **known.aggregators}]
    of_codecs = costs([one for one in missing if isinstance(one, Codec)])
    of_others = {o.recorded(): computing(o, threads) for o in missing if isinstance(o, Aggregator)}
    known = replace(
        known,
        codecs={**known.codecs, **of_codecs},
        aggregators={**known.aggregators, **of_others},
        link=replace(known.link, **_GOODPUT),
    )
    known.save(file)
    return known


def computing(aggregator: Aggregator, threads: int) -> list[Curve]:
    """The curves of an aggregator, before each of its rounds and after the last."""
    progress(f"computing of {aggregator}", 0, 1)
    points: list[tuple[int, int, list[float]]] = []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for numel, ranks in itertools.product((side * side for side in _SIDES), _WORLDS):
        names, shape = map(str, range(_VALUES // numel)), (math.isqrt(numel),) * 2
        members = [
            Attached(name, shape, aggregator, rng.parameter_keys(0, name, 0), step=STEADY)
            for name in names
        ]
        turns = []
        for _ in range(1 + _TURNS):
            parts = torch.randn(_VALUES, dtype=torch.float32).split(numel)
            reductions = [AllReduce(part) for part in parts]
            marks = [time.perf_counter()]
            for _ in rounds_of(members, reductions, Options(), 0, ranks):
                marks.append(time.perf_counter())
            turns.append([b - a for a, b in itertools.pairwise([*marks, time.perf_counter()])])
        medians = [statistics.median(of) / len(members) for of in zip(*turns[1:], strict=True)]
        points.append((numel, ranks, medians))
    torch.set_num_threads(before)
    stages = max(len(medians) for *_, medians in points)  # fewer, where no matrix shrinks
    whole = [point for point in points if len(point[2]) == stages]
    return [
        kernel_costs.fit([(numel, ranks, medians[at]) for numel, ranks, medians in whole])
        for at in range(stages)
    ]


# ---- one of the two ranks


def measure() -> list[dict[str, float]]:
    """One row: seconds (memory: bytes per second)."""
    torch.set_num_threads(1)
    transport = TorchP2P()
    tags = itertools.count(step=_TAGS)
    small = torch.zeros(64, dtype=torch.uint8)
    round_trips(transport, small, 20, next(tags))  # connects
    found = {
        "trip": statistics.median(round_trips(transport, small, _ROUNDS, next(tags))) / 2,
        "post": statistics.median(_post(transport, next(tags)) for _ in range(_TURNS)),
        "stack": statistics.median(_stack(transport, next(tags)) for _ in range(_TURNS)),
        **_check(),
        "memory": _memory(),
    }
    comm = Communicator(TorchP2P(dist.new_group()))
    for segments in SEGMENTS:
        found[f"tiny {segments}"] = _tiny(comm, segments)
    dist.barrier()
    comm.close()
    transport.close()
    return [found]


def _post(transport: TorchP2P, tag: int) -> float:
    """Seconds to post a send or a receive."""
    peer = 1 - transport.rank
    messages = [torch.zeros(64, dtype=torch.uint8) for _ in range(2 * _POSTS)]
    begun = time.perf_counter()
    pending = [transport.irecv(messages[i], peer, tag + i) for i in range(_POSTS)]
    pending += [transport.isend(messages[_POSTS + i], peer, tag + i) for i in range(_POSTS)]
    seconds = time.perf_counter() - begun
    for each in pending:
        each.wait()
    return seconds / len(pending)


def _stack(transport: TorchP2P, tag: int) -> float:
    """Seconds of core time per byte and end, averaged over both ends."""
    messages = [torch.zeros(1 << 22, dtype=torch.uint8) for _ in range(_STREAM)]
    begun = time.process_time()
    one_way(transport, messages, tag)
    spent = torch.tensor(time.process_time() - begun, dtype=torch.float64)
    dist.all_reduce(spent)
    return float(spent) / 2 / sum(m.numel() for m in messages)


def _check() -> dict[str, float]:
    """Seconds to check a message: its header, and the checksum per byte."""
    envelope, checks = Envelope(plan=1, sequence=1, segment=0, chunk=0), []
    for nbytes in (1 << 10, 1 << 21):
        message = torch.zeros(HEADER_BYTES + nbytes, dtype=torch.uint8)
        seal(message, envelope)
        checks.append(partial(check, message, envelope, 0))
    small, large = interleaved.medians(checks, 1, "c", quick=False)
    return {"check": small, "check_byte": max(large - small, 0.0) / (1 << 21)}


def _memory() -> float:
    """Bytes per second that one copy moves."""
    source, target = (torch.zeros(1 << 23, dtype=torch.float32) for _ in range(2))
    (seconds,) = interleaved.medians([lambda: target.copy_(source)], 1, "c", quick=False)
    return source.nbytes / seconds


def _tiny(comm: Communicator, segments: int) -> float:
    """Seconds of a small all-reduce on the slower rank: the 10th percentile, to exclude noise."""
    options = gradwire.Options(segments=segments)
    values = torch.zeros(VALUES, dtype=torch.float32)

    def reduced(step: int) -> None:
        gradwire.all_reduce(values, "identity", group=comm, step=step, options=options)

    turns = [interleaved.slowest(partial(reduced, step)) for step in range(_ROUNDS)]
    return sorted(turns)[_ROUNDS // 10]
