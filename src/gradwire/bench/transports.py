"""`gradwire bench transports`: shared memory against gloo on loopback, between two ranks.

Both transports move the same messages between the same two processes, interleaved (A B A B), as the
engine uses them: receives are posted before their messages are sent. Each rank has its own core if
there are two.

A row: transport (shm, gloo), bytes (per message), latency_us (half a round trip), gbps (1e9 bytes
/ s of several messages in flight in one direction, until the last has arrived). latency_us is the
median over messages, gbps the median over turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.bench import memory, workers
from gradwire.bench.provenance import stamped
from gradwire.errors import ConfigError
from gradwire.lab import Network
from gradwire.transport import shm_library

SIZES = (64, 4096, 1 << 16, 1 << 20, 1 << 24)  # bytes
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Config:
    """The arguments of both ranks."""

    sizes: tuple[int, ...]
    turns: int


@stamped
def run(
    sizes: Sequence[int | str] | None = None,
    quick: bool = False,
    advance: workers.Advance | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each transport and size.

    Args:
        sizes: bytes per message.
        quick: fewer turns.
        advance: is called with every size.

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
    config = Config(tuple(map(int, sizes or SIZES)), 7 if quick else 21)
    network = Network.parse("none")
    worker = "gradwire.bench.transports_worker"
    yield from workers.rows(worker, config, 2, network, _TIMEOUT_S, advance)
