"""Exchanges and agreements: they end when every rank has come, or when two ranks differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gradwire.control.description import Description
from gradwire.control.namespace import Namespace
from gradwire.control.pending_result import PendingResult
from gradwire.errors import ConfigError, TransportError

_NAMED = 8  # the most missing ranks that an error names
_REMEMBERED = 1024  # the most differences remembered for agreements that this rank has not reached


@dataclass
class Incarnation:
    """The incarnation of a group in which a rank has its place.

    Attributes:
        space: its keys in the store.
        publish: appends (kind, key) to its news journal.
        garbled: called with an entry that cannot be parsed.
    """

    rank: int
    world_size: int
    space: Namespace
    publish: Callable[[str, str], None]
    garbled: Callable[[bytes], None]

    @property
    def ranks(self) -> list[str]:
        return [str(rank) for rank in range(self.world_size)]

    def error(self, reason: str, peer: int | None = None) -> TransportError:
        return TransportError(f"rank {self.rank}: {reason}", peer)

    def fail_late(self, pending: PendingResult[Any], came: Namespace) -> None:
        """Fail `pending`, which has timed out, with the ranks that have no key in `came`."""
        missing = came.missing(self.ranks, _NAMED + 1)
        if missing:
            pending.fail_without(missing[:_NAMED], more=len(missing) > _NAMED)
            return
        pending.fail(
            self.error(
                f"{pending.what} timed out after {pending.timeout:g} s, as the last rank came, "
                "and other ranks may have completed it: give the group a longer timeout"
            )
        )


def _used_twice(incarnation: Incarnation, key: str) -> ConfigError:
    return ConfigError(f"rank {incarnation.rank} uses the key '{key}' twice: use each once")


class Exchanges:
    """Each rank writes its bytes and increments a counter; the last publishes, and all read."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._open: dict[str, PendingResult[list[bytes]]] = {}

    def start(self, key: str, mine: bytes, pending: PendingResult[list[bytes]]) -> None:
        if key in self._open:
            pending.fail(_used_twice(self._incarnation, key))
            return
        self._open[key] = pending
        space = self._space(key)
        space.write(str(self._incarnation.rank), mine)
        if space.add("n") == self._incarnation.world_size:
            self._incarnation.publish("exchanged", key)
            self.complete(key)

    def complete(self, key: str) -> None:
        """A rank has published that all have come.

        Raises:
            ValueError: the store shows otherwise.
        """
        if key in self._open:
            found = self._space(key).read_all(self._incarnation.ranks)
            if found is None:
                raise ValueError
            self._open.pop(key).succeed(found)

    def expire(self, pending: PendingResult[Any]) -> None:
        for key in [key for key, held in self._open.items() if held is pending]:
            del self._open[key]
            self._incarnation.fail_late(pending, self._space(key))

    def lacking(self, dead: int) -> list[str]:
        """What is open, and was not reached by a rank that has died. What all have reached ends:
        the last may have died before it could publish so."""
        found = []
        for key, pending in list(self._open.items()):
            if self._space(key).read(str(dead)) is None:
                found.append(pending.what)
            else:
                with suppress(ValueError):  # others are late
                    self.complete(key)
        return found

    @property
    def pending(self) -> list[PendingResult[Any]]:
        return list(self._open.values())

    def _space(self, key: str) -> Namespace:
        return self._incarnation.space.below(f"exchanges/{key}")


@dataclass
class _Agreement:
    """An open agreement of this rank.

    Attributes:
        other: a rank that is known to differ.
    """

    pending: PendingResult[int]
    mine: Description
    other: int | None = None


class Agreements:
    """The first rank writes its digest and description; the others compare their digests.

    A rank with the same digest increments a counter, and the last publishes. A rank that differs
    writes its own description, and publishes that it differs.
    """

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._open: dict[str, _Agreement] = {}
        self._differing: dict[str, int] = {}

    def start(self, key: str, mine: Description, pending: PendingResult[int]) -> None:
        if key in self._open:
            pending.fail(_used_twice(self._incarnation, key))
            return
        agreement = self._open[key] = _Agreement(pending, mine)
        incarnation, space, rank = self._incarnation, self._space(key), self._incarnation.rank
        held = f"{mine.digest.hex()} {rank}".encode()
        first = space.first("digest", held)
        space.below("came").write(str(rank), held)
        if first.split(b" ")[0] != held.split(b" ")[0]:
            space.below("descriptions").write(str(rank), mine.packed())
            incarnation.publish("differs", key)
            holder = re.fullmatch(rb"[0-9a-f]{64} ([0-9]{1,9})", first)
            if holder is None:
                incarnation.garbled(first)
            else:
                self._compare(key, agreement, int(holder[1]))
            return
        if first == held:
            space.below("descriptions").write(str(rank), mine.packed())
        if key in self._differing:
            self._compare(key, agreement, self._differing.pop(key))
        elif space.add("n") == incarnation.world_size:
            incarnation.publish("agreed", key)
            self.complete(key)

    def complete(self, key: str) -> None:
        """A rank has published that all have come and agree."""
        agreement = self._open.pop(key, None)
        if agreement is not None:
            agreement.pending.succeed(agreement.mine.number)

    def differ(self, key: str, sender: int) -> None:
        """Rank `sender` has published that it differs from the first."""
        agreement = self._open.get(key)
        if agreement is None:
            if len(self._differing) < _REMEMBERED:
                self._differing.setdefault(key, sender)
        elif agreement.other is None:  # else this rank differs, and has another to compare with
            self._compare(key, agreement, sender)

    def look(self) -> None:
        """Compare with ranks that differ, if their descriptions have been written."""
        for key, agreement in list(self._open.items()):
            if agreement.other is not None:
                self._compare(key, agreement, agreement.other)

    @property
    def must_poll(self) -> bool:
        return any(agreement.other is not None for agreement in self._open.values())

    def expire(self, pending: PendingResult[Any]) -> None:
        for key in [key for key, held in self._open.items() if held.pending is pending]:
            other = self._open.pop(key).other
            if other is None:
                self._incarnation.fail_late(pending, self._space(key).below("came"))
            else:
                reason = f"rank {other} has a different {pending.what}, and has not described it"
                pending.fail(self._incarnation.error(reason, other))

    def lacking(self, dead: int) -> list[str]:
        """As `Exchanges.lacking`."""
        found = []
        for key, agreement in list(self._open.items()):
            came = self._space(key).below("came")
            every = came.read_all(self._incarnation.ranks)
            mine = agreement.mine.digest.hex().encode()
            if came.read(str(dead)) is None:
                found.append(agreement.pending.what)
            elif every is not None and all(held.split(b" ")[0] == mine for held in every):
                self.complete(key)
        return found

    @property
    def pending(self) -> list[PendingResult[Any]]:
        return [agreement.pending for agreement in self._open.values()]

    def _compare(self, key: str, agreement: _Agreement, other: int) -> None:
        """Fail the agreement, because `other` differs, once its description can be read."""
        agreement.other = other
        held = self._space(key).below("descriptions").read(str(other))
        if held is None:
            return  # not written yet
        try:
            theirs = Description.unpacked(other, held)
        except ValueError:
            self._incarnation.garbled(held)
            theirs = Description(other, ("(unreadable)",))
        if theirs.lines == agreement.mine.lines:
            agreement.other = None  # the entry was false
            self._incarnation.garbled(held)
            return
        del self._open[key]
        agreement.pending.fail(ConfigError(agreement.mine.difference(theirs)))

    def _space(self, key: str) -> Namespace:
        return self._incarnation.space.below(f"agreements/{key}")
