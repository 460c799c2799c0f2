"""The rank that holds each share of the values, in nested groups of ranks.

Vocabulary. A *unit* is a rank, or a group of units: a machine is a group of ranks, a row of a grid
is a group of machines, and all ranks together are the outermost group. *Tier* 0 is the tier of
the innermost groups. At tier t, values are cut into S(t) *shares*, the number of units of the
largest group; in that group, unit k has share k. In a smaller group of g units, unit u has all
shares k with k mod g = u. A *prefix* is a share of a share: (k0, k1) is share k1, at tier 1, of
share k0, at tier 0. A chunk is a prefix whose length is the number of tiers.

In each unit of tier t exactly one rank holds a given prefix of length t. These ranks, one per unit
of a group, are *counterparts*: they exchange the prefix's chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from operator import mul
from typing import TypeAlias

Unit: TypeAlias = "int | tuple[Unit, ...]"
Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Tiers:
    """Nested groups; all ranks have the same depth.

    Attributes:
        outermost: the group of all ranks.
        roles: per tier, the role of what is sent to holders, innermost first.
    """

    outermost: tuple[Unit, ...]
    roles: tuple[str, ...]

    @cached_property
    def paths(self) -> dict[int, tuple[int, ...]]:
        """Per rank, the index of its unit in its group at each tier, innermost first."""
        found: dict[int, tuple[int, ...]] = {}

        def walk(unit: Unit, path: tuple[int, ...]) -> None:
            if isinstance(unit, int):
                found[unit] = path
                return
            for place, inner in enumerate(unit):
                walk(inner, (place, *path))

        walk(self.outermost, ())
        return found

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """S(t) per tier, innermost first."""
        return tuple(max(places) + 1 for places in zip(*self.paths.values(), strict=True))

    @property
    def depth(self) -> int:
        """The number of tiers."""
        return len(self.roles)

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return self._weights[-1]

    def group(self, rank: int, tier: int) -> tuple[Unit, ...]:
        """The group of `rank` at `tier`."""
        found: Unit = self.outermost
        for place in reversed(self.paths[rank][tier + 1 :]):
            assert not isinstance(found, int)
            found = found[place]
        assert not isinstance(found, int)
        return found

    def counterparts(self, rank: int, prefix: Prefix) -> list[int]:
        """The ranks of `rank`'s group that hold `prefix` in their units, `rank` included."""
        return [_holder(unit, prefix) for unit in self.group(rank, len(prefix))]

    def shares_of(self, unit: int, rank: int, tier: int) -> range:
        """The shares of a unit in `rank`'s group."""
        return range(unit, self.shares[tier], len(self.group(rank, tier)))

    def held(self, rank: int, tier: int) -> list[Prefix]:
        """The prefixes of length `tier` that `rank` holds in its unit of that tier."""
        if not tier:
            return [()]
        before = self.held(rank, tier - 1)
        shares = self.shares_of(self.paths[rank][tier - 1], rank, tier - 1)
        return [(*prefix, share) for prefix in before for share in shares]

    def away(self, rank: int, tier: int) -> list[tuple[Prefix, int]]:
        """(prefix, its holder) for the parts of what `rank` holds that belong to other units of its
        group; units after its own come first."""
        units, place = len(self.group(rank, tier)), self.paths[rank][tier]
        found = []
        for prefix in self.held(rank, tier):
            holders = self.counterparts(rank, prefix)
            for unit in (*range(place + 1, units), *range(place)):
                shares = self.shares_of(unit, rank, tier)
                found += [((*prefix, share), holders[unit]) for share in shares]
        return found

    def chunks_of(self, prefix: Prefix) -> list[int]:
        """The chunks of a prefix, in an order in which those of every longer prefix are
        consecutive."""
        if len(prefix) == self.depth:
            return [self._number(prefix)]
        if prefix not in self._known:
            shares = range(self.shares[len(prefix)])
            self._known[prefix] = [c for share in shares for c in self.chunks_of((*prefix, share))]
        return self._known[prefix]

    @cached_property
    def _known(self) -> dict[Prefix, list[int]]:
        """A cache of `chunks_of`."""
        return {}

    @cached_property
    def owners(self) -> list[int]:
        """Per chunk, the rank that computes its final sum."""
        found = [-1] * self.chunks
        for chunk in product(*map(range, self.shares)):
            found[self._number(chunk)] = _holder(self.outermost, chunk)
        return found

    def between(self, rank: int, other: int) -> int:
        """The tier at which two ranks are counterparts."""
        places = zip(self.paths[rank], self.paths[other], strict=True)
        return max(tier for tier, (a, b) in enumerate(places) if a != b)

    @cached_property
    def _weights(self) -> tuple[int, ...]:
        return tuple(accumulate(self.shares, mul, initial=1))

    def _number(self, chunk: Sequence[int]) -> int:
        """Chunk numbers count the innermost tier first: a machine's chunks are consecutive."""
        return sum(map(mul, chunk, self._weights))


def _holder(unit: Unit, prefix: Prefix) -> int:
    """The rank of a unit that holds a prefix."""
    for share in reversed(prefix):
        assert not isinstance(unit, int)
        unit = unit[share % len(unit)]
    assert isinstance(unit, int)
    return unit
