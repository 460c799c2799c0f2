"""`gradwire bench transports`: shared memory against gloo on loopback, between two ranks.

Both transports move the same messages between the same two processes, interleaved (A B A B), as the
engine uses them: receives are posted before their messages are sent. Each rank has its own core if
there are two.

A row: transport (shm, gloo), bytes (per message), latency_us (half a round trip), gbps (1e9 bytes
/ s of several messages in flight in one direction, until the last has arrived). latency_us is the
median over messages, gbps the median over turns.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from gradwire.errors import ConfigError
from gradwire.transport import Mixed, TorchP2P, Transport, shm_library
from gradwire_tools.bench import memory, workers
from gradwire_tools.bench.network.world import World
from gradwire_tools.bench.progress import progress
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.rows import Row, row_kind

KINDS = (
    row_kind(
        "bench transports",
        "transport latency_us",
        "transport:text bytes:positive latency_us:amount gbps:amount",
    ),
)

SIZES = (64, 4096, 1 << 16, 1 << 20, 1 << 24)  # bytes
_TIMEOUT_S = 300.0
_STREAM_BYTES = 1 << 25  # in flight per turn, in at most _STREAM_MOST messages
_STREAM_MOST = 64
_TURN_S = 0.03  # of round trips per turn, by gloo's latency
_TAGS = 1 << 10  # tags per measurement: each message in flight has its own, as in the engine


@stamped
def run(
    sizes: Sequence[int | str] | None = None,
    quick: bool = False,
) -> Iterator[Row]:
    """Yield a row for each transport and size.

    Args:
        sizes: bytes per message.
        quick: fewer turns.

    Raises:
        ConfigError: a size is not a number or below 1, or shared memory does not work on this
            machine; the message has the reason.
        WorkerError: a rank failed.
    """
    for size in sizes or ():
        if not str(size).isdecimal() or int(size) < 1:
            raise ConfigError(f"--bytes {size}: give a number of bytes per message, 1 or more")
        memory.check(f"--bytes {size}", 4 * int(size))  # two messages at each end
    reason = shm_library.unavailable()
    if reason is not None:
        raise ConfigError(f"no shared memory here: {reason}")
    given = [int(size) for size in sizes or SIZES], 7 if quick else 21
    yield from workers.measured(World.here(2, "none"), _TIMEOUT_S, measure, *given)


# ---- one of the two ranks


def measure(sizes: Sequence[int], turns: int) -> list[Row]:
    """Rows of both transports, interleaved."""
    torch.set_num_threads(1)
    _pin_to_core(dist.get_rank())
    transports: dict[str, Transport] = {"shm": Mixed(), "gloo": TorchP2P(dist.new_group())}
    assert transports["shm"].reached, "shared memory does not reach the other rank"
    tags = itertools.count(step=_TAGS)
    rows = []
    for index, size in enumerate(sizes):
        progress(f"messages of {size} bytes", index, len(sizes))
        data = torch.zeros(size, dtype=torch.uint8)
        count = max(2, min(_STREAM_MOST, _STREAM_BYTES // size))
        messages = [torch.zeros(size, dtype=torch.uint8) for _ in range(count)]
        usual = statistics.median(round_trips(transports["gloo"], data, 9, next(tags)))
        share = torch.tensor(usual, dtype=torch.float32)
        dist.broadcast(share, 0)
        times = max(3, min(300, int(_TURN_S / float(share))))
        turns_of: dict[str, list[tuple[list[float], float]]] = {name: [] for name in transports}
        for _ in range(1 + turns):
            for name, transport in transports.items():
                trips = round_trips(transport, data, times, next(tags))
                turns_of[name].append((trips, one_way(transport, messages, next(tags))))
        for name, measured in turns_of.items():
            latencies, streams = zip(*measured[1:], strict=True)  # the first warms up
            latency = statistics.median(itertools.chain.from_iterable(latencies)) / 2
            gbps = size * count / statistics.median(streams) / 1e9
            rows.append(
                {"transport": name, "bytes": size, "latency_us": 1e6 * latency, "gbps": gbps}
            )
    dist.barrier()
    for transport in transports.values():
        transport.close()
    return rows


def _synchronise(transport: Transport, tag: int) -> None:
    """Wait for the other rank."""
    peer = 1 - transport.rank
    received = transport.irecv(torch.empty(1, dtype=torch.uint8), peer, tag)
    transport.isend(torch.zeros(1, dtype=torch.uint8), peer, tag).wait()
    received.wait()


def round_trips(transport: Transport, data: torch.Tensor, times: int, tag: int) -> list[float]:
    """Seconds of each of `times` round trips of messages of `data`'s size.

    Uses the tags from `tag` on.
    """
    peer = 1 - transport.rank
    inboxes = [data.clone() for _ in range(2)]  # a clone, so that timing includes no page faults
    coming = transport.irecv(inboxes[0], peer, tag)
    _synchronise(transport, tag + times)
    seconds = []
    for turn in range(times):
        begun = time.perf_counter()
        if transport.rank == 0:
            sent = transport.isend(data, peer, tag + turn)
        arrived = coming
        if turn + 1 < times:
            coming = transport.irecv(inboxes[(turn + 1) % 2], peer, tag + turn + 1)
        arrived.wait()
        if transport.rank == 1:
            sent = transport.isend(data, peer, tag + turn)
        sent.wait()
        seconds.append(time.perf_counter() - begun)
    return seconds


def one_way(transport: Transport, messages: list[torch.Tensor], tag: int) -> float:
    """Seconds to send all `messages` from rank 0 to rank 1, and an acknowledgement back.

    Uses the tags from `tag` on.
    """
    peer = 1 - transport.rank
    acknowledgement, last = torch.zeros(1, dtype=torch.uint8), tag + len(messages)
    numbered, sends = list(enumerate(messages, tag)), transport.rank == 0
    comes = [(last, acknowledgement)] if sends else numbered
    coming = [transport.irecv(m, peer, number) for number, m in comes]
    _synchronise(transport, last + 1)
    begun = time.perf_counter()
    pending = [transport.isend(m, peer, number) for number, m in numbered] if sends else []
    for each in (*pending, *coming):
        each.wait()
    if not sends:
        transport.isend(acknowledgement, peer, last).wait()
    return time.perf_counter() - begun


def _pin_to_core(rank: int) -> None:
    """Pin this rank, including gloo's threads, to its own core if there are two.

    Otherwise the scheduler may keep both ranks on one core, and the time includes their waits for
    that core.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 1:
            os.sched_setaffinity(0, {cores[rank]})
