"""Which ranks share a machine, by host names and by torchrun's LOCAL_WORLD_SIZE."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.engine.neighbours import Process

_FACTS = struct.Struct("<32sI?32sQQ")


@dataclass(frozen=True)
class Facts:
    """What a rank tells all others when a group opens.

    Attributes:
        host: digest of its machine's name.
        local: how many ranks its machine has; 0: unknown.
        in_memory: whether none of its messages leaves the memory of its machine.
        process: its own.
    """

    host: bytes
    local: int
    in_memory: bool
    process: Process

    @classmethod
    def here(cls, in_memory: bool) -> Facts:
        """This rank's."""
        told = os.environ.get("LOCAL_WORLD_SIZE", "")
        host = hashlib.blake2b(socket.gethostname().encode(), digest_size=32).digest()
        return cls(host, int(told) if told.isdecimal() else 0, in_memory, Process.own())

    def pack(self) -> bytes:
        p = self.process
        return _FACTS.pack(self.host, self.local, self.in_memory, p.space, p.number, p.started)

    @classmethod
    def unpack(cls, packed: bytes) -> Facts:
        host, local, in_memory, *process = _FACTS.unpack(packed)
        return cls(host, local, in_memory, Process(*process))


@dataclass(frozen=True)
class Topology:
    """A process group as one of its ranks sees it.

    Attributes:
        rank, world_size: as in torch, within the group.
        machines: the machine of each rank, any numbers; empty where nobody needs to know.
        in_memory: whether no message of any rank leaves the memory of one machine.
        processes: of the ranks; empty where nobody needs to know.
    """

    rank: int
    world_size: int
    machines: tuple[int, ...] = ()
    in_memory: bool = False
    processes: tuple[Process, ...] = ()

    @classmethod
    def of(cls, rank: int, facts: Sequence[Facts]) -> Topology:
        """From every rank's facts, in rank order."""
        machines = numbered([(f.host, f.local) for f in facts])
        processes = tuple(f.process for f in facts)
        return cls(rank, len(facts), machines, all(f.in_memory for f in facts), processes)

    def over(self) -> int | None:
        """A rank of this machine whose process has ended, as far as that can be seen; or None."""
        space = self.processes[self.rank].space if self.processes else b""
        return next((r for r, p in enumerate(self.processes) if p.is_over(space)), None)


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
