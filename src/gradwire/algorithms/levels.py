"""Who holds which share of the values, in groups of ranks within groups of ranks.

Vocabulary. A *unit* is a rank, or a group of units: a machine is a group of ranks, a row of a grid
a group of machines, and all ranks together are the outermost group. *Level* 0 is that of the
innermost groups. At level t values are cut into as many *shares* as the largest group has units,
S(t); share k is its k-th unit's. In a group of g units fewer, unit u has all shares k with k mod g
= u. A *prefix* is a share of a share: (k0, k1) is share k1, at level 1, of share k0, at level 0. A
chunk is a prefix as long as there are levels.

In each unit of level t exactly one rank holds a given prefix of length t. These ranks, one in each
unit of a group, are *counterparts*: they exchange what the prefix stands for.
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
class Levels:
    """Groups within groups; all ranks stand equally deep.

    Attributes:
        outermost: the group of all.
        roles: of what travels to holders at each level, innermost first.
    """

    outermost: tuple[Unit, ...]
    roles: tuple[str, ...]

    @cached_property
    def paths(self) -> dict[int, tuple[int, ...]]:
        """Of each rank, which unit of its group it is in, innermost first."""
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
        """S(t) of each level, innermost first."""
        return tuple(max(places) + 1 for places in zip(*self.paths.values(), strict=True))

    @property
    def depth(self) -> int:
        """How many levels there are."""
        return len(self.roles)

    @property
    def chunks(self) -> int:
        """How many there are."""
        return self._weights[-1]

    def group(self, rank: int, level: int) -> tuple[Unit, ...]:
        """The group of `rank`'s unit."""
        found: Unit = self.outermost
        for place in reversed(self.paths[rank][level + 1 :]):
            assert not isinstance(found, int)
            found = found[place]
        assert not isinstance(found, int)
        return found

    def counterparts(self, rank: int, prefix: Prefix) -> list[int]:
        """The ranks that hold what `rank` does, itself included, unit by unit."""
        return [_holder(unit, prefix) for unit in self.group(rank, len(prefix))]

    def shares_of(self, unit: int, rank: int, level: int) -> range:
        """The shares that fall to a unit of `rank`'s group."""
        return range(unit, self.shares[level], len(self.group(rank, level)))

    def held(self, rank: int, level: int) -> list[Prefix]:
        """What `rank` holds of its unit of this level: prefixes of that length."""
        if not level:
            return [()]
        before = self.held(rank, level - 1)
        shares = self.shares_of(self.paths[rank][level - 1], rank, level - 1)
        return [(*prefix, share) for prefix in before for share in shares]

    def away(self, rank: int, level: int) -> list[tuple[Prefix, int]]:
        """(prefix, its holder) of what `rank` holds of its unit, and others of its group; the units
        behind its own first."""
        units, place = len(self.group(rank, level)), self.paths[rank][level]
        found = []
        for prefix in self.held(rank, level):
            holders = self.counterparts(rank, prefix)
            for unit in (*range(place + 1, units), *range(place)):
                shares = self.shares_of(unit, rank, level)
                found += [((*prefix, share), holders[unit]) for share in shares]
        return found

    def of(self, prefix: Prefix) -> list[int]:
        """The chunks that a prefix stands for, so that those of a longer one are a stretch."""
        if len(prefix) == self.depth:
            return [self._number(prefix)]
        if prefix not in self._known:
            shares = range(self.shares[len(prefix)])
            self._known[prefix] = [c for share in shares for c in self.of((*prefix, share))]
        return self._known[prefix]

    @cached_property
    def _known(self) -> dict[Prefix, list[int]]:
        """What prefixes stand for, as they are asked for."""
        return {}

    @cached_property
    def owners(self) -> list[int]:
        """Of each chunk, the rank that makes its final sum."""
        found = [-1] * self.chunks
        for chunk in product(*map(range, self.shares)):
            found[self._number(chunk)] = _holder(self.outermost, chunk)
        return found

    def between(self, rank: int, other: int) -> int:
        """The level at which two ranks are counterparts."""
        places = zip(self.paths[rank], self.paths[other], strict=True)
        return max(level for level, (a, b) in enumerate(places) if a != b)

    @cached_property
    def _weights(self) -> tuple[int, ...]:
        return tuple(accumulate(self.shares, mul, initial=1))

    def _number(self, chunk: Sequence[int]) -> int:
        """Chunks count the innermost level first: those of a machine stand side by side."""
        return sum(map(mul, chunk, self._weights))


def _holder(unit: Unit, prefix: Prefix) -> int:
    """The rank of a unit that holds a prefix."""
    for share in reversed(prefix):
        assert not isinstance(unit, int)
        unit = unit[share % len(unit)]
    assert isinstance(unit, int)
    return unit
