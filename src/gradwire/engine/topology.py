"""Which ranks share a machine, from host names and torchrun's LOCAL_WORLD_SIZE."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_FACTS = struct.Struct("<32sI?")


@dataclass(frozen=True)
class RankInfo:
    """What a rank tells all others when a group opens.

    Attributes:
        host: digest of its host name.
        local: how many ranks its machine has; 0: unknown.
        in_memory: whether all its messages stay in its machine's memory.
    """

    host: bytes
    local: int
    in_memory: bool

    @classmethod
    def here(cls, in_memory: bool) -> RankInfo:
        """This rank's info."""
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        host = hashlib.blake2b(socket.gethostname().encode(), digest_size=32).digest()
        return cls(host, int(local) if local.isdecimal() else 0, in_memory)

    def pack(self) -> bytes:
        return _FACTS.pack(self.host, self.local, self.in_memory)

    @classmethod
    def unpack(cls, packed: bytes) -> RankInfo:
        return cls(*_FACTS.unpack(packed))


@dataclass(frozen=True)
class Topology:
    """A process group as one of its ranks sees it.

    Attributes:
        rank, world_size: as in torch, within the group.
        machines: the machine of each rank, any numbers; empty where it does not matter.
        in_memory: whether all messages of all ranks stay in one machine's memory.
    """

    rank: int
    world_size: int
    machines: tuple[int, ...] = ()
    in_memory: bool = False

    @classmethod
    def of(cls, rank: int, infos: Sequence[RankInfo]) -> Topology:
        """The topology, from every rank's info in rank order."""
        machines = numbered([(f.host, f.local) for f in infos])
        return cls(rank, len(infos), machines, all(f.in_memory for f in infos))


def numbered(ranks: Sequence[tuple[bytes, int]]) -> tuple[int, ...]:
    """The machine of each rank, from its (host, number of ranks on its machine or 0: unknown).

    Machines that were copied from one image may share a host name: a host name with more ranks than
    a machine has counts as several machines, in the order of ranks.
    """
    seen: dict[bytes, int] = {}
    found: dict[tuple[bytes, int], int] = {}
    machines = []
    for host, local in ranks:
        before = seen.get(host, 0)
        seen[host] = before + 1
        machine = (host, before // local if local else 0)
        machines.append(found.setdefault(machine, len(found)))
    return tuple(machines)
