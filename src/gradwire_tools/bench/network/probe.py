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

import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from gradwire import __version__, codecs, groups
from gradwire.errors import ConfigError
from gradwire.lang import Codec
from gradwire.lang.native import cache
from gradwire.planner.files import write_whole
from gradwire.planner.links import MOST_SECONDS, measure_links, measure_sends
from gradwire_tools.bench import memory, workers
from gradwire_tools.bench.micro import curves
from gradwire_tools.bench.network.world import World
from gradwire_tools.bench.progress import progress
from gradwire_tools.bench.provenance import now, stamped
from gradwire_tools.bench.rows import Row, row_kind

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
_TIMEOUT_S = 600.0
_RANK_BYTES = 100 << 20  # that a process with torch takes, at least
_SEND_BYTES = tuple(1 << power for power in range(10, 25, 2))  # 1 KB to 16 MB
_SEND_S = 1.0  # of the largest message, at most


@dataclass(frozen=True)
class ProbePlan:
    """What the command line asks for.

    Attributes:
        seconds: that measuring the links should take.
        fresh: whether earlier measurements are ignored.
    """

    world: World
    codecs: tuple[Codec, ...]
    seconds: float
    fresh: bool

    def measured(self) -> list[Row]:
        """Pairs and sends, of ranks that are started here or as one of those of torchrun."""
        return workers.measured(self.world, _TIMEOUT_S, measure, self.seconds)


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
    return ProbePlan(world, tuple(codecs.get(name) for name in names), seconds, fresh)


@stamped
def run(wanted: ProbePlan) -> Iterator[Row]:
    """Yield the rows.

    Raises:
        WorkerError: a rank failed.
        TransportError: torchrun's ranks cannot be joined.
    """
    world = wanted.world
    file = cache_file([socket.gethostname()] * world.count, str(world.network))
    # Nothing here tells by which cards and network torchrun's ranks are joined.
    known = None if wanted.fresh or world.joins else kept(file)
    found = known or {"rows": wanted.measured(), "measured": now()}
    if known is None and not world.joins:
        write_whole(file, json.dumps(found))
    where = {**world.keys, "cached": known is not None}
    for row in found["rows"]:
        yield {**row, **where, "measured": found["measured"]}
    costs = curves.measured(wanted.codecs, fresh=wanted.fresh)
    for codec in wanted.codecs:
        for form, (call, value, payload) in costs.codecs[repr(codec)].items():
            yield {
                "part": "curve",
                "codec": repr(codec),
                "form": form,
                "call": call,
                "value": value,
                "payload": payload,
                "threads": costs.threads,
                **where,
            }


# ---- one rank


def measure(seconds: float) -> list[Row]:
    """Rows of pairs and sends, alike on all ranks; measuring the links should take `seconds`."""
    progress("links", 0, 1)
    comm = groups.communicator()
    links = measure_links(comm, seconds)
    rows: list[Row] = []
    for i in range(links.ranks):
        for j in range(links.ranks):
            if i != j:
                alpha, beta = links.alpha[i][j], links.beta[i][j]
                costs = {"alpha": alpha, "beta": beta, "bandwidth": 8 / beta}
                rows.append({"part": "pair", "from": i, "to": j, **costs})
    beta = links.beta[0][1]
    sizes = [size for size in _SEND_BYTES if size * beta < _SEND_S or size == _SEND_BYTES[0]]
    for nbytes, took in measure_sends(comm, sizes).items():
        rows.append({"part": "send", "bytes": nbytes, "seconds": took})
    assert dist.group.WORLD is not None
    groups.release(dist.group.WORLD)  # before rank 0, which has the store, may end
    return rows


# ---- the cache


def cache_file(hosts: Sequence[str], net: str) -> Path:
    """Where the pairs and sends of ranks on these hosts are kept."""
    key = json.dumps([*hosts, net, __version__])
    name = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return cache.folder() / f"probe-{name}.json"


def kept(file: Path) -> Row | None:
    """`rows` and when they were `measured`, or None."""
    try:
        found: Row = json.loads(file.read_text())
        whole = {row["part"] for row in found["rows"]} == {"pair", "send"} and "measured" in found
    except (OSError, ValueError, TypeError, KeyError):
        return None  # it is measured again
    return found if whole else None
