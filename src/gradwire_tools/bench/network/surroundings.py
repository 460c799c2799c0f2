"""Where the ranks of `gradwire doctor` are: their machines and what else runs there, the slowest
link between them, and the network card that carries it, as the kernel tells it."""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gradwire.engine import Communicator
from gradwire.planner.links import measure_links
from gradwire.transport.shm_handshake import machine_name
from gradwire_tools.bench.rows import Row

_SECONDS = 1.0  # that measuring links should take
_REST = 0.5  # seconds; the kernel counts in hundredths
_STAT = Path("/proc/stat")
_DEVICES = Path("/sys/class/net")
_SIOCGIFADDR = 0x8915
_ANY_PORT = 9  # a datagram socket that is connected sends nothing


def slowest_link(comm: Communicator) -> Row:
    """The pair of ranks with the least bandwidth: what it has, and its latency."""
    links = measure_links(comm, _SECONDS)
    pairs = itertools.combinations(range(links.ranks), 2)
    beta, pair = max((max(links.beta[a][b], links.beta[b][a]), (a, b)) for a, b in pairs)
    latency = links.alpha[pair[0]][pair[1]]
    return {"bandwidth": 8 / max(beta, 1e-12), "alpha": latency, "slowest": [*pair]}


def others() -> float:
    """The share of this machine's cores that other processes take while all ranks rest.

    Processes of low priority (nice) do not count: they yield.
    """
    dist.barrier()
    before = _ticks()
    time.sleep(_REST)
    taken, whole = (after - then for after, then in zip(_ticks(), before, strict=True))
    return taken / whole if whole else 0.0


def _ticks() -> tuple[int, int]:
    """Of all cores since the machine started: what processes of normal priority took, and all."""
    user, nice, system, idle, wait, irq, softirq, steal, *_ = map(
        int, _STAT.read_text().split(maxsplit=9)[1:9]
    )
    taken = user + system + irq + softirq + steal
    return taken, taken + nice + idle + wait


def machines(comm: Communicator, load: float, taken: float) -> tuple[Row, Row]:
    """The ranks' machines: how many, what carries gradwire's messages, and the busiest one's cores,
    what others take of them, and load; and the card between the machine of rank 0 and another one,
    with its speed."""
    transport = comm.transport
    own = machine_name(), getattr(transport, "name", type(transport).__name__)
    card = card_to(os.environ.get("MASTER_ADDR", ""))  # the machine of rank 0
    speed = None if card is None else speed_of(card)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (*own, load, taken, os.cpu_count() or 1, card, speed))
    hosts, transports, loads, shares, cores, *_ = zip(*found, strict=True)
    busiest = max(range(len(found)), key=shares.__getitem__)
    names = {name for one in transports for name in one.split("+")}
    where = {
        "machines": len(set(hosts)), "transport": "+".join(sorted(names)),
        "load": round(loads[busiest], 2), "others": round(shares[busiest], 3),
        "cores": cores[busiest],
    }  # fmt: skip
    inside = "shared memory" if "shm" in names else "loopback", None
    *_, card, speed = next((one for one in found if one[0] != hosts[0]), inside)
    return where, {"card": card, "card_bits_per_s": speed}


def card_to(host: str) -> str | None:
    """The name of the card, such as "eth0": that of GLOO_SOCKET_IFNAME, else the one whose address
    messages to `host` come from; None: it is not known."""
    if given := os.environ.get("GLOO_SOCKET_IFNAME"):
        return given.split(",")[0]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as reaching:
        reaching.connect((host, _ANY_PORT))
        own = reaching.getsockname()[0]
        return next((card for _, card in socket.if_nameindex() if _address(card) == own), None)
    return None


def speed_of(card: str) -> float | None:
    """Bits per second; None where the kernel does not know, or the card is none (a veth pair)."""
    folder = _DEVICES / card
    if not any((folder / kind).exists() for kind in ("device", "bonding")):
        return None
    with suppress(OSError, ValueError):  # "Invalid argument" where no cable is
        speed = 1e6 * int((folder / "speed").read_text())
        return speed if speed > 0 else None
    return None


def _address(card: str) -> str | None:
    """The IPv4 address of a card."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asked = struct.pack("256s", card.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(asking, _SIOCGIFADDR, asked)[20:24])
    return None
