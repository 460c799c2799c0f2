"""One of the two ranks of `gradwire bench transports`, which starts it."""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

from gradwire.bench import workers
from gradwire.bench.transports import Config
from gradwire.transport import Mixed, TorchP2P, Transport

_STREAM_BYTES = 1 << 25  # in flight per turn, in at most _STREAM_MOST messages
_STREAM_MOST = 64
_TURN_S = 0.03  # of round trips per turn, by gloo's latency
_TAGS = 1 << 10  # tags per measurement: each message in flight has its own, as in the engine


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
    numbered = list(enumerate(messages, tag))
    if transport.rank == 0:
        answer = transport.irecv(acknowledgement, peer, last)
        _synchronise(transport, last + 1)
        begun = time.perf_counter()
        pending = [transport.isend(m, peer, number) for number, m in numbered]
        for each in (*pending, answer):
            each.wait()
    else:
        coming = [transport.irecv(m, peer, number) for number, m in numbered]
        _synchronise(transport, last + 1)
        begun = time.perf_counter()
        for each in coming:
            each.wait()
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


def main(arguments: list[str]) -> None:
    """Measure both transports, interleaved; rank 0 reports the rows."""
    config, events = workers.configured(Config, arguments)
    torch.set_num_threads(1)
    _pin_to_core(int(os.environ["RANK"]))
    dist.init_process_group("gloo")
    transports: dict[str, Transport] = {"shm": Mixed(), "gloo": TorchP2P(dist.new_group())}
    assert transports["shm"].reached, "shared memory does not reach the other rank"
    tags = itertools.count(step=_TAGS)
    rows = []
    for index, size in enumerate(config.sizes):
        events.progress(f"messages of {size} bytes", index, len(config.sizes))
        data = torch.zeros(size, dtype=torch.uint8)
        count = max(2, min(_STREAM_MOST, _STREAM_BYTES // size))
        messages = [torch.zeros(size, dtype=torch.uint8) for _ in range(count)]
        usual = statistics.median(round_trips(transports["gloo"], data, 9, next(tags)))
        share = torch.tensor(usual)
        dist.broadcast(share, 0)
        times = max(3, min(300, int(_TURN_S / float(share))))
        latencies: dict[str, list[float]] = {name: [] for name in transports}
        streams: dict[str, list[float]] = {name: [] for name in transports}
        for turn in range(1 + config.turns):  # the first warms up
            for name, transport in transports.items():
                trips = round_trips(transport, data, times, next(tags))
                stream = one_way(transport, messages, next(tags))
                if turn:
                    latencies[name] += trips
                    streams[name].append(stream)
        for name in transports:
            rows.append(
                {
                    "transport": name,
                    "bytes": size,
                    "latency_us": 1e6 * statistics.median(latencies[name]) / 2,
                    "gbps": size * count / statistics.median(streams[name]) / 1e9,
                }
            )
    events.rows(rows)
    dist.barrier()
    for transport in transports.values():
        transport.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
