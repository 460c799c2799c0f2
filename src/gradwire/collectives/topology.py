"""Where ranks are: which share a machine, by host names and by torchrun's LOCAL_WORLD_SIZE."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.engine import Communicator

_HOST_BYTES, _LOCAL_BYTES = 32, 8


@dataclass(frozen=True)
class Topology:
    """Where a rank is among all.

    Attributes:
        rank, world_size: as in torch.
        machines: the machine of each rank, any numbers; empty where nobody needs to know.
    """

    rank: int
    world_size: int
    machines: tuple[int, ...] = ()


def machines(comm: Communicator) -> tuple[int, ...]:
    """The machine of each rank, numbered from 0; one round trip, which all ranks take together.

    Raises:
        TransportError: a peer did not answer.
    """
    host = hashlib.blake2b(socket.gethostname().encode(), digest_size=_HOST_BYTES).digest()
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    local = int(told) if told.isdecimal() else 0
    record = host + local.to_bytes(_LOCAL_BYTES, "little")
    records = comm.exchange(record, [len(record)] * comm.world_size)
    return numbered([(r[:_HOST_BYTES], int.from_bytes(r[_HOST_BYTES:], "little")) for r in records])


def numbered(ranks: Sequence[tuple[bytes, int]]) -> tuple[int, ...]:
    """The machine of each rank, from its (host, number of ranks on its machine or 0: unknown).

    Machines that were copied from one image may share a host name: where more ranks have one than
    a machine has ranks, they are taken as several machines, in the order of ranks.
    """
    seen: dict[bytes, int] = {}
    found: dict[tuple[bytes, int], int] = {}
    nodes = []
    for host, local in ranks:
        before = seen.get(host, 0)
        seen[host] = before + 1
        machine = (host, before // local if local else 0)
        nodes.append(found.setdefault(machine, len(found)))
    return tuple(nodes)
