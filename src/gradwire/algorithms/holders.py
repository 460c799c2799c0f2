"""The rank of every machine that handles a shard there, for collectives of shards in two tiers.

Vocabulary. Shard c belongs to rank c, its *owner*. On every machine one rank is the *holder* of
shard c: on the owner's machine the owner, and on every other machine the rank through which the
shard leaves or enters. The *place* of a rank is its number if ranks are counted machine by machine.
On a machine of g ranks, local rank p mod g holds the shards whose owners have place p, so that each
rank holds as many shards as its neighbours, or one more or less. If machines have equal numbers of
ranks, the holders of a shard have the owner's local rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gradwire.algorithms.halves import peers_after


@dataclass(frozen=True)
class Holders:
    """The holders of all shards.

    Attributes:
        nodes: the machine of each rank, any numbers.
    """

    nodes: tuple[int, ...]

    @cached_property
    def machines(self) -> list[tuple[int, ...]]:
        """The ranks of each machine, in rank order."""
        found: dict[int, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            found.setdefault(node, []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    @property
    def rounds_between(self) -> int:
        """The number of messages between machines on the longest dependency chain."""
        return int(len(self.machines) > 1)

    @property
    def rounds(self) -> int:
        """The number of messages on the longest dependency chain."""
        return self.rounds_between + int(len(self.machines) < len(self.nodes))

    def beside(self, rank: int) -> list[int]:
        """The other ranks of `rank`'s machine; those after it come first."""
        return peers_after(rank, self._machine[rank])

    def held(self, rank: int) -> list[int]:
        """The shards of other machines that `rank` holds; those after its own come first."""
        ranks = self._machine[rank]
        local = ranks.index(rank)
        shards = {c for place, c in enumerate(self._order) if place % len(ranks) == local}
        return peers_after(rank, shards - set(ranks))

    def abroad(self, shard: int) -> list[int]:
        """The holders of a shard on all machines but its owner's; those after the owner come
        first."""
        own, place = self._machine[shard], self._order.index(shard)
        holders = {ranks[place % len(ranks)] for ranks in self.machines if ranks != own}
        return peers_after(shard, holders)

    @cached_property
    def _machine(self) -> list[tuple[int, ...]]:
        """Per rank, the ranks of its machine."""
        found = {rank: ranks for ranks in self.machines for rank in ranks}
        return [found[rank] for rank in range(len(self.nodes))]

    @cached_property
    def _order(self) -> list[int]:
        """The ranks by place."""
        return [rank for ranks in self.machines for rank in ranks]


@dataclass(frozen=True)
class OnMachines:
    """Base class of the algorithms whose chunks are shards, on given machines.

    Attributes:
        nodes: machine of each rank; empty: every rank has its own machine.
    """

    nodes: tuple[int, ...] = ()

    def chunks(self, world_size: int) -> int:
        return world_size

    def rounds(self, world_size: int) -> int:
        return self.holders(world_size).rounds

    def rounds_between(self, world_size: int) -> int:
        """The number of `rounds` between machines."""
        return self.holders(world_size).rounds_between

    def holders(self, world_size: int) -> Holders:
        """The holders of all chunks."""
        assert len(self.nodes) in (0, world_size), (self.nodes, world_size)
        return Holders(self.nodes or tuple(range(world_size)))
