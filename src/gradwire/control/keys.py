"""Keys of a store: those below one prefix, and a journal, an append-only list.

`read` and `counted` use compare_set, which returns a key's value without changing it and without
waiting; `get` waits until the key exists, and torch writes to standard error when a wait times out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

# What compare_set returns for a key that does not exist. Values start with "=", numbers with a
# digit, so neither equals it; and no value is empty, which compare_set treats as a missing key.
_MISSING = "?"
_MARK = b"="
# More new entries of a journal than this at a time mean that its counter is corrupt.
_MOST = 1 << 20
# Up to this many entries are read one by one; more, with two operations for all.
_FEW = 3


class Namespace:
    """The keys of a store below one prefix. Each method is one small operation, and waits for none.

    Args:
        store: a torch.distributed Store, which may be used from several threads.
        prefix: the prefix of every key.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def below(self, name: str) -> Namespace:
        return Namespace(self._store, f"{self._prefix}{name}/")

    def write(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, _MARK + value)

    def read(self, key: str) -> bytes | None:
        """The value of `key`, or None."""
        return _unmarked(self._store.compare_set(self._prefix + key, _MISSING, _MISSING))

    def first(self, key: str, value: bytes) -> bytes:
        """Write `value` if `key` has none yet; returns the value of `key`."""
        held = _unmarked(self._store.compare_set(self._prefix + key, "", _MARK + value))
        return value if held is None else held

    def add(self, key: str) -> int:
        """Increment the counter `key`; returns the new count."""
        return int(self._store.add(self._prefix + key, 1))

    def counted(self, key: str) -> int:
        """The counter `key`; 0 where it does not exist.

        Raises:
            ValueError: the key holds no number.
        """
        held = self._store.compare_set(self._prefix + key, _MISSING, _MISSING)
        return 0 if held == _MISSING.encode() else int(held)

    def read_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """The values of `keys`; None where one is missing."""
        names = [self._prefix + key for key in keys]
        if not self._store.check(names):
            return None
        values = [_unmarked(held) for held in self._store.multi_get(names)]
        found = [value for value in values if value is not None]
        return found if len(found) == len(names) else None

    def missing(self, keys: Sequence[str], most: int) -> list[int]:
        """Indices of the first `most` keys that do not exist, found by bisection."""
        found: list[int] = []

        def look(start: int, end: int) -> None:
            if len(found) >= most or self._store.check(
                [self._prefix + key for key in keys[start:end]]
            ):
                return
            if end - start == 1:
                found.append(start)
                return
            middle = (start + end) // 2
            look(start, middle)
            look(middle, end)

        look(0, len(keys))
        return found


class Journal:
    """An append-only list, which any number of readers read from its start; and one's position.

    A writer first increments the list's counter, then writes the entry of that number: two
    operations, however many write at once. A reader skips an entry that is counted but not yet
    written, and returns to it later. So entries of one writer are read in order; entries of
    different writers in any order.

    Args:
        space: its keys.
        patience: seconds after which the reader gives up an entry that is counted and not written,
            because its writer died in between.

    Attributes:
        unwritten: the places of such entries, and when each is given up.
    """

    def __init__(self, space: Namespace, patience: float) -> None:
        self._space = space
        self._patience = patience
        self._counted = 0
        self.unwritten: dict[int, float] = {}

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
        until = time.monotonic() + self._patience
        places = {**self.unwritten, **dict.fromkeys(range(self._counted + 1, count + 1), until)}
        self._counted = count
        names = [str(place) for place in places]
        entries: Sequence[bytes | None] | None = None
        if len(names) > _FEW:
            entries = self._space.read_all(names)
        if entries is None:
            entries = [self._space.read(name) for name in names]
        self.unwritten = {
            place: until
            for (place, until), entry in zip(places.items(), entries, strict=True)
            if entry is None and time.monotonic() < until
        }
        return [entry for entry in entries if entry is not None]


def _unmarked(held: bytes) -> bytes | None:
    return held[1:] if held[:1] == _MARK else None
