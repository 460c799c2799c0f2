"""A list in the store that grows at its end, and is read from its start by whoever likes.

An entry's place is counted first and written then, so that a thousand writers at once cost two
operations each. A reader that finds a place counted and not yet written passes it by, and comes
back to it. So entries of one writer are read in order; those of two may be read in any.
"""

from __future__ import annotations

import time

from gradwire.control.space import Space

# More entries than this at a time are no journal of ours.
_MOST = 1 << 20
# Read one by one up to here, and else with two operations for all.
_FEW = 3


class Journal:
    """A journal, and how far this reader has read it.

    Args:
        space: where it stands.
        patience: seconds after which an entry that was counted and never written, since its writer
            died between the two, is given up.
    """

    def __init__(self, space: Space, patience: float) -> None:
        self._space = space
        self._patience = patience
        self._counted = 0
        self._unwritten: dict[int, float] = {}  # place -> when to give it up

    @property
    def has_gaps(self) -> bool:
        """Whether entries are counted and not yet written."""
        return bool(self._unwritten)

    def append(self, entry: bytes) -> None:
        self._space.write(str(self._space.add("n")), entry)

    def new(self) -> list[bytes]:
        """What is to be read and was not, in order.

        Raises:
            ValueError: the journal's counter makes no sense.
        """
        count = self._space.counted("n")
        if not 0 <= count - self._counted < _MOST:
            raise ValueError(f"a journal of {count} entries, of which {self._counted} were read")
        now = time.monotonic()
        places = [*self._unwritten, *range(self._counted + 1, count + 1)]
        self._counted = count
        if len(places) > _FEW:
            entries = self._space.read_all([str(place) for place in places])
            if entries is not None:
                self._unwritten = {}
                return entries
        found = []
        unwritten = {}
        for place in places:
            entry = self._space.read(str(place))
            if entry is not None:
                found.append(entry)
            elif now < (until := self._unwritten.get(place, now + self._patience)):
                unwritten[place] = until
        self._unwritten = unwritten
        return found
