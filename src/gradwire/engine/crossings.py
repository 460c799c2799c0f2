"""Two ranks that wait for each other in two owners: two modules whose backwards come in another
order, or the gathers and scatters of one sharded module that a rank evaluates once more.

Places are compared within an owner, so neither rank has issued anything wrong: each waits for a
round that the other will issue only after its own. A rank that hears of a round that it has not
issued tells so, if the thread that issues this owner's rounds is waiting for another owner. A rank
that waits for the first, and whose own thread therefore does not issue the second, then knows that
neither will end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gradwire.engine.owner import Owner

Place = tuple[str, int, int]  # owner's key, ticket, round


class Crossings:
    """Of one communicator.

    Args:
        owners: the open ones.
        tell: sends a notice to all peers.
    """

    def __init__(
        self, owners: Callable[[], Sequence[Owner]], tell: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._owners = owners
        self._tell = tell
        self._told: set[tuple[Place, Place]] = set()

    def look(self, expected: Iterable[Place]) -> None:
        """Tell of those places, issued by peers, that this rank will not issue at present."""
        for place in expected:
            owner = self._owner(place[0])
            if owner is None:
                continue
            for other in self._owners():
                waits_for = other.awaited_by
                blocks = other is not owner and waits_for and waits_for == owner.issued_by
                ticket = other.oldest() if blocks else None
                if ticket is None:
                    continue
                at = (other.key, *ticket.under_way()[0])
                if (place, at) not in self._told:
                    self._told.add((place, at))
                    self._tell({"kind": "crossed", "place": place, "waits": at})

    def found(self, notice: Mapping[str, Any]) -> tuple[Owner, Owner] | None:
        """(the owner for which this rank waits, that for which the sender does), if neither wait
        can end; else None."""
        (key, *place), (other_key, *waits) = notice["place"], notice["waits"]
        mine, theirs = self._owner(key), self._owner(other_key)
        if (
            mine is None
            or theirs is None
            or mine.awaited_by is None
            or mine.awaited_by != theirs.issued_by
            or mine.issued(*place) is None
            or mine.rounds_of(place[0]) is not None
            or theirs.issued(*waits) is not None
            or theirs.rounds_of(waits[0]) is not None
        ):
            return None
        return mine, theirs

    def _owner(self, key: str) -> Owner | None:
        return next((owner for owner in self._owners() if owner.key == key), None)
