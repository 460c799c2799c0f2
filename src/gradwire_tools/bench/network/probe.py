"""`gradwire probe`: what the network between ranks costs, and what codecs cost on this machine.

Ranks run in the lab, or are those that torchrun has started. Rows, by `part`:

    pair    from, to (ranks), alpha (seconds of latency), beta (seconds per byte), bandwidth (bits
            per second: 8 / beta); see gradwire/planner/links.py
    send    bytes, seconds: of a message from rank 0 to rank 1, the median of several
    curve   codec, form, call, value, payload: a call of this kernel takes
            call + values (value + payloads payload) seconds, for fp32 values

All rows have ranks, net, cached (whether an earlier measurement is shown), measured (when that was,
UTC) and `run` (bench/provenance.py). Pairs and sends are kept in the user's cache, by the
hosts of the ranks and the network; curves as `gradwire sim` keeps them.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire import __version__, codecs, groups
from gradwire.errors import ConfigError
from gradwire.lang import Codec, kernel_cache
from gradwire.planner.links import MOST_SECONDS, measure_links, measure_sends
from gradwire.planner.whole import write_whole
from gradwire_tools.bench import memory, workers
from gradwire_tools.bench.micro import curves
from gradwire_tools.bench.network.world import World
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.rows import row_kind

_PROBED = "ranks:positive net:text cached:flag"
KINDS = (
    row_kind(
        "probe",
        "from to alpha",
        f"{_PROBED} measured:text from:count to:count alpha:amount beta:amount bandwidth:amount?",
        part="pair",
    ),
    row_kind(
        "probe",
        "cached bytes",
        f"{_PROBED} measured:text bytes:count seconds:amount",
        part="send",
    ),
    row_kind(
        "probe",
        "codec form call",
        f"{_PROBED} codec:text form:text call:amount value:amount payload:amount",
        "threads:positive",
        part="curve",
    ),
)


CODECS = ("qsgd", "topk")
SECONDS = 5.0
_WORKER = "gradwire_tools.bench.network.probe"  # this module, as a program
_TIMEOUT_S = 600.0
_RANK_BYTES = 100 << 20  # that a process with torch takes, at least
_SEND_BYTES = tuple(1 << power for power in range(10, 25, 2))  # 1 KB to 16 MB
_SEND_S = 1.0  # of the largest message, at most

Row = dict[str, Any]


@dataclass(frozen=True)
class ProbeConfig:
    """What every rank is told.

    Attributes:
        seconds: that measuring the links should take.
    """

    seconds: float = SECONDS


@dataclass(frozen=True)
class ProbePlan:
    """What the command line asks for.

    Attributes:
        fresh: whether earlier measurements are ignored.
    """

    world: World
    codecs: tuple[Codec, ...]
    config: ProbeConfig
    fresh: bool


def plan(
    ranks: int | None = None,
    net: str = "none",
    names: Sequence[str] = CODECS,
    seconds: float = SECONDS,
    fresh: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> ProbePlan:
    """What is to be measured.

    Args:
        ranks: 2 unless given, or as many as torchrun has started.
        net: RATE,LATENCY between ranks that are started here, or none.

    Raises:
        ConfigError: a number that makes no sense, an unknown codec, an impossible network, or
            options that do not go together.
    """
    world = World.of(ranks, net, environment)
    if not world.joins:
        memory.check(f"--ranks {world.count}", world.count * _RANK_BYTES)
    if not 0 < seconds <= MOST_SECONDS:
        raise ConfigError(f"--seconds {seconds:g}: give seconds above 0, {MOST_SECONDS:g} at most")
    made = tuple(codecs.get(name) for name in names)
    return ProbePlan(world, made, ProbeConfig(seconds), fresh)


@stamped
def run(wanted: ProbePlan, advance: workers.Advance | None = None) -> Iterator[Row]:
    """Yield the rows.

    Raises:
        WorkerError: a rank failed.
        TransportError: torchrun's ranks cannot be joined, or one failed.
    """
    world = wanted.world
    found = join(wanted) if world.joins else _started(wanted, advance)
    cached = found["cached"]
    where = {"ranks": world.count, "net": world.net, "cached": cached}
    for row in found["rows"]:
        yield {**row, **where, "measured": found["measured"]}
    known = curves.measured(wanted.codecs, fresh=wanted.fresh and not cached, advance=advance)
    for codec in wanted.codecs:
        for form, (call, value, payload) in known.codecs[str(codec)].items():
            costs = {"call": call, "value": value, "payload": payload}
            named = {"part": "curve", "codec": str(codec), "form": form}
            yield {**named, **costs, "threads": known.threads, **where}


def _started(wanted: ProbePlan, advance: workers.Advance | None) -> Row:
    """Pairs and sends of ranks that are started here, or as they are known."""
    count, network = wanted.world.count, wanted.world.network
    file = cache_file([socket.gethostname()] * count, wanted.world.net)
    known = None if wanted.fresh else kept(file)
    if known is not None:
        return known
    return keep(file, workers.rows(_WORKER, wanted.config, count, network, _TIMEOUT_S, advance))


def join(wanted: ProbePlan) -> Row:
    """As one of the ranks that torchrun has started: pairs and sends, alike on all ranks. They are
    measured each time: nothing here tells by which cards and network ranks are joined."""
    with wanted.world.joined():
        return {"measured": now(), "rows": measure(wanted.config), "cached": False}


# ---- a rank, started on every node or by torchrun


def measure(config: ProbeConfig) -> list[Row]:
    """Rows of pairs and sends, in the default group; alike on all ranks."""
    comm = groups.communicator()
    links = measure_links(comm, config.seconds)
    rows: list[Row] = []
    for i in range(links.ranks):
        for j in range(links.ranks):
            if i != j:
                alpha, beta = links.alpha[i][j], links.beta[i][j]
                costs = {"alpha": alpha, "beta": beta, "bandwidth": 8 / beta}
                rows.append({"part": "pair", "from": i, "to": j, **costs})
    beta = links.beta[0][1]
    sizes = [size for size in _SEND_BYTES if size * beta < _SEND_S or size == _SEND_BYTES[0]]
    for nbytes, seconds in measure_sends(comm, sizes).items():
        rows.append({"part": "send", "bytes": nbytes, "seconds": seconds})
    assert dist.group.WORLD is not None
    groups.release(dist.group.WORLD)  # before rank 0, which has the store, may end
    return rows


def main(arguments: list[str]) -> None:
    """Measure, and on rank 0 report."""
    config, events = workers.configured(ProbeConfig, arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    events.progress("links", 0, 1)
    events.rows(measure(config))
    dist.barrier()
    dist.destroy_process_group()


# ---- the cache


def cache_file(hosts: Sequence[str], net: str) -> Path:
    """Where the pairs and sends of ranks on these hosts are kept."""
    key = json.dumps([*hosts, net, __version__])
    name = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return kernel_cache.folder() / f"probe-{name}.json"


def keep(file: Path, rows: list[Row]) -> Row:
    """Keep rows; what has just been kept."""
    measured = now()
    write_whole(file, json.dumps({"measured": measured, "rows": rows}))
    return {"measured": measured, "rows": rows, "cached": False}


def now() -> str:
    """The time, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def kept(file: Path) -> Row | None:
    """What was kept, or None."""
    try:
        found = json.loads(file.read_text())
        measured, rows = found["measured"], found["rows"]
        whole = {row["part"] for row in rows} == {"pair", "send"}
    except (OSError, ValueError, TypeError, KeyError):
        return None  # it is measured again
    return {"measured": measured, "rows": rows, "cached": True} if whole else None


if __name__ == "__main__":
    main(sys.argv[1:])
