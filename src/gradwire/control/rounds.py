"""Exchanges and agreements: what ends when every rank has come, or two are known to differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradwire.control.awaited import Awaited
from gradwire.control.description import Description
from gradwire.control.space import Space
from gradwire.errors import ConfigError, TransportError

_NAMED = 8  # of ranks that are missing, at most
_REMEMBERED = 1024  # differences found by others, before this rank has come


@dataclass
class Incarnation:
    """The incarnation of a group that a rank has its place in.

    Attributes:
        space: its part of the store.
        publish: writes (kind, key) to its news.
        garbled: called with what cannot be read.
    """

    rank: int
    world_size: int
    space: Space
    publish: Callable[[str, str], None]
    garbled: Callable[[bytes], None]

    @property
    def ranks(self) -> list[str]:
        return [str(rank) for rank in range(self.world_size)]

    def error(self, reason: str, peer: int | None = None) -> TransportError:
        return TransportError(f"rank {self.rank}: {reason}", peer)

    def fail_late(self, pending: Awaited[Any], came: Space) -> None:
        """End `pending`, whose time has run out, with the ranks that have no key in `came`."""
        missing = came.missing(self.ranks, _NAMED + 1)
        if missing:
            pending.fail_without(missing[:_NAMED], more=len(missing) > _NAMED)
            return
        pending.fail(
            self.error(
                f"all ranks came to {pending.what} as {pending.timeout:g} s ran out, and other "
                "ranks may hold it for complete: give the group more time"
            )
        )


def _used_twice(incarnation: Incarnation, key: str) -> ConfigError:
    return ConfigError(f"rank {incarnation.rank} uses the key '{key}' twice: use each once")


class Exchanges:
    """Every rank's bytes: each writes its own and counts; the last publishes, and all read."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._open: dict[str, Awaited[list[bytes]]] = {}

    def start(self, key: str, mine: bytes, pending: Awaited[list[bytes]]) -> None:
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
        """The news says that all have come.

        Raises:
            ValueError: it is not so.
        """
        if key in self._open:
            found = self._space(key).read_all(self._incarnation.ranks)
            if found is None:
                raise ValueError
            self._open.pop(key).succeed(found)

    def expire(self, pending: Awaited[Any]) -> None:
        for key in [key for key, held in self._open.items() if held is pending]:
            del self._open[key]
            self._incarnation.fail_late(pending, self._space(key))

    @property
    def pending(self) -> list[Awaited[Any]]:
        return list(self._open.values())

    def _space(self, key: str) -> Space:
        return self._incarnation.space.below(f"exchanges/{key}")


@dataclass
class _Agreement:
    """An agreement that this rank has come to.

    Attributes:
        other: a rank that is known to hold something else.
    """

    pending: Awaited[int]
    mine: Description
    other: int | None = None


class Agreements:
    """All hold the same: the first writes its digest and its description; the others compare.

    Who holds the same counts, and the last publishes. Who holds something else writes that, and
    publishes that it differs.
    """

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._open: dict[str, _Agreement] = {}
        self._differing: dict[str, int] = {}

    def start(self, key: str, mine: Description, pending: Awaited[int]) -> None:
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
        """The news says that all have come and hold the same."""
        agreement = self._open.pop(key, None)
        if agreement is not None:
            agreement.pending.succeed(agreement.mine.number)

    def differ(self, key: str, sender: int) -> None:
        """The news says that `sender` holds something else than the first."""
        agreement = self._open.get(key)
        if agreement is None:
            if len(self._differing) < _REMEMBERED:
                self._differing.setdefault(key, sender)
        elif agreement.other is None:  # else this rank differs itself, and knows from whom
            self._compare(key, agreement, sender)

    def look(self) -> None:
        """See whether those that differ have said what they hold."""
        for key, agreement in list(self._open.items()):
            if agreement.other is not None:
                self._compare(key, agreement, agreement.other)

    @property
    def looks_again(self) -> bool:
        return any(agreement.other is not None for agreement in self._open.values())

    def expire(self, pending: Awaited[Any]) -> None:
        for key in [key for key, held in self._open.items() if held.pending is pending]:
            other = self._open.pop(key).other
            if other is None:
                self._incarnation.fail_late(pending, self._space(key).below("came"))
            else:
                reason = f"rank {other} holds another {pending.what}, and has not said what"
                pending.fail(self._incarnation.error(reason, other))

    @property
    def pending(self) -> list[Awaited[Any]]:
        return [agreement.pending for agreement in self._open.values()]

    def _compare(self, key: str, agreement: _Agreement, other: int) -> None:
        """End the agreement, since `other` holds something else, once that can be read."""
        agreement.other = other
        held = self._space(key).below("descriptions").read(str(other))
        if held is None:
            return  # it is being written
        try:
            theirs = Description.unpacked(other, held)
        except ValueError:
            self._incarnation.garbled(held)
            theirs = Description(other, ("(what cannot be read)",))
        if theirs.lines == agreement.mine.lines:
            agreement.other = None  # the news was not true
            self._incarnation.garbled(held)
            return
        del self._open[key]
        agreement.pending.fail(ConfigError(agreement.mine.difference(theirs)))

    def _space(self, key: str) -> Space:
        return self._incarnation.space.below(f"agreements/{key}")
