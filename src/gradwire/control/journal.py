"""An append-only list in the store, which any number of readers read from its start.

A writer first increments the list's counter, then writes the entry of that number: two operations,
however many write at once. A reader skips an entry that is counted but not yet written, and returns
to it later. So entries of one writer are read in order; entries of different writers in any order.
"""

from __future__ import annotations

import time

from gradwire.control.namespace import Namespace

# More new entries than this at a time mean that the counter is corrupt.
_MOST = 1 << 20
# Up to this many entries are read one by one; more, with two operations for all.
_FEW = 3


class Journal:
    """A journal, and one reader's position in it.

    Args:
        space: its keys.
        patience: seconds after which the reader gives up an entry that is counted and not written,
            because its writer died in between.
    """

    def __init__(self, space: Namespace, patience: float) -> None:
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
        """The entries that were not read before, in order.

        Raises:
            ValueError: the journal's counter is corrupt.
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
