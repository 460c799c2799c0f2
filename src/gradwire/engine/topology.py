"""Which ranks share a machine, from host names and torchrun's LOCAL_WORLD_SIZE."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

Facts = tuple[Hashable, int, bool]


def facts(in_memory: bool) -> Facts:
    """What this rank tells all others when a group opens: the digest of its host name, how many
    ranks its machine has (0: unknown), and whether all its messages stay in its memory."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    host = hashlib.blake2b(socket.gethostname().encode(), digest_size=32).hexdigest()
    return host, int(local) if local.isdecimal() else 0, in_memory


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
    def of(cls, rank: int, told: Sequence[Facts]) -> Topology:
        """The topology, from every rank's `facts` in rank order."""
        machines = numbered([(host, local) for host, local, _ in told])
        return cls(rank, len(told), machines, all(in_memory for *_, in_memory in told))


def numbered(ranks: Sequence[tuple[Hashable, int]]) -> tuple[int, ...]:
    """The machine of each rank, from its (host, number of ranks on its machine or 0: unknown).

    Machines that were copied from one image may share a host name: a host name with more ranks than
    a machine has counts as several machines, in the order of ranks.
    """
    seen: dict[Hashable, int] = {}
    found: dict[tuple[Hashable, int], int] = {}
    machines = []
    for host, local in ranks:
        before = seen.get(host, 0)
        seen[host] = before + 1
        machine = (host, before // local if local else 0)
        machines.append(found.setdefault(machine, len(found)))
    return tuple(machines)
