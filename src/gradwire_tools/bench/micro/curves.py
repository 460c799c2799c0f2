"""Measures this machine for `gradwire sim`: the kernels' curves and the engine's overheads.

Kernels as in gradwire/planner/kernel_costs.py. The engine is measured between two ranks of this
machine over gloo: posting, latency, processor time per byte, and the time of a tiny all-reduce
beyond the simulated time. The results are kept in the user's cache.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

import gradwire
from gradwire.codecs import Identity, name_of
from gradwire.engine import HEADER_BYTES, Communicator
from gradwire.engine.message import Envelope, check, seal
from gradwire.lang import Codec
from gradwire.planner import kernel_costs
from gradwire.transport import TorchP2P
from gradwire_tools.bench import interleaved, workers
from gradwire_tools.bench.network.transports import one_way, round_trips
from gradwire_tools.bench.network.world import World
from gradwire_tools.bench.progress import progress
from gradwire_tools.sim import Curves, curves
from gradwire_tools.sim.calibrate import SEGMENTS, VALUES, engine
from gradwire_tools.sim.curves import Curve

_TIMEOUT_S = 120.0
_POSTS = 64
_STREAM = 12  # messages of 4 MB
_TAGS = 1 << 10
_TURNS = 5
_ROUNDS = 200
# The shares of a link's rate that TCP gets in the lab, with one busy connection and with several,
# and the seconds that several lose at first (docs/laboratory/simulator.md). They are constants
# because not every machine has a lab.
_GOODPUT = {"goodput": 0.985, "shared": 0.965, "settling": 0.003}


def measured(
    codecs: Iterable[Codec],
    threads: int = 1,
    fresh: bool = False,
) -> Curves:
    """The curves of these codecs, and of Identity, on this machine.

    Args:
        threads: threads per kernel.
        fresh: ignore cached results.

    Raises:
        WorkerError: a rank that measures the engine failed.
    """
    wanted = list(dict.fromkeys([*codecs, Identity()]))
    file = kernel_costs.file(threads)

    def costs(of: Sequence[Codec]) -> dict[str, dict[str, Curve]]:
        found = {}
        for index, codec in enumerate(of):
            progress(f"kernels of {name_of(codec)}", index, len(of))
            found[str(codec)] = kernel_costs.kernel_curves(codec, threads)
        return found

    if fresh or not file.exists():
        kernels = Curves(kernel_costs.processor(), threads, costs([Identity()]))
        (overheads,) = workers.measured(World.here(2, "none"), _TIMEOUT_S, measure)
        known = engine(kernels, overheads)
    else:
        known = curves.load(file)
    missing = [codec for codec in wanted if str(codec) not in known.codecs]
    link = replace(known.link, **_GOODPUT)
    known = replace(known, codecs={**known.codecs, **costs(missing)}, link=link)
    known.save(file)
    return known


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
