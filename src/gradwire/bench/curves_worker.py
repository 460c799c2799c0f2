"""One of the two ranks that measure the engine for `gradwire sim`; bench.curves starts them."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import gradwire
from gradwire.bench import workers
from gradwire.bench.curves import Config
from gradwire.bench.transports_worker import one_way, round_trips
from gradwire.engine import HEADER_BYTES, Communicator
from gradwire.engine.message import Envelope, check, seal
from gradwire.sim.calibrate import SEGMENTS, VALUES
from gradwire.transport import TorchP2P

_POSTS = 64
_STREAM = 12  # messages of 4 MB
_TAGS = 1 << 10
_TURNS = 5
_ROUNDS = 200


def main(arguments: list[str]) -> None:
    """Measure; rank 0 reports a dict of seconds (memory: bytes per second)."""
    _, events = workers.configured(Config, arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = TorchP2P()
    tags = itertools.count(step=_TAGS)
    round_trips(transport, torch.zeros(64, dtype=torch.uint8), 20, next(tags))  # connects
    found = {
        "trip": statistics.median(
            round_trips(transport, torch.zeros(64, dtype=torch.uint8), _ROUNDS, next(tags))
        )
        / 2,
        "post": statistics.median(_post(transport, next(tags)) for _ in range(_TURNS)),
        "stack": statistics.median(_stack(transport, next(tags)) for _ in range(_TURNS)),
        **_check(),
        "memory": _memory(),
    }
    comm = Communicator(TorchP2P(dist.new_group()))
    for segments in SEGMENTS:
        found[f"tiny {segments}"] = _tiny(comm, segments)
    events.rows([found])
    dist.barrier()
    comm.close()
    transport.close()
    dist.destroy_process_group()


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
    envelope = Envelope(plan=1, sequence=1, segment=0, chunk=0)

    def seconds(nbytes: int) -> float:
        message = torch.zeros(HEADER_BYTES + nbytes, dtype=torch.uint8)
        seal(message, envelope)
        return _median(lambda: check(message, envelope, 0))

    small, large = seconds(1 << 10), seconds(1 << 21)
    return {"check": small, "check_byte": max(large - small, 0.0) / (1 << 21)}


def _memory() -> float:
    """Bytes per second that one copy moves."""
    source, target = torch.zeros(1 << 23), torch.zeros(1 << 23)
    return source.nbytes / _median(lambda: target.copy_(source), turns=9)


def _tiny(comm: Communicator, segments: int) -> float:
    """Seconds of a small all-reduce on the slower rank: the 10th percentile, to exclude noise."""
    options = gradwire.Options(segments=segments)
    values = torch.zeros(VALUES)
    turns = []
    for step in range(_ROUNDS):
        dist.barrier()
        begun = time.perf_counter()
        gradwire.all_reduce(values, "identity", group=comm, step=step, options=options)
        spent = torch.tensor(time.perf_counter() - begun)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        turns.append(float(spent))
    return sorted(turns)[_ROUNDS // 10]


def _median(function: Callable[[], object], turns: int = 50) -> float:
    times = []
    for _ in range(1 + turns):
        begun = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
