"""Ranges of tags: which layout of which owner has which, the same on all ranks.

Ranks meet layouts in any order. Whoever needs a range for one claims the next that is free, by a
compare-and-set in the group's store, and so learns whose the others are. Numbers of ranges only
grow; tags have them modulo `RANGES`, and a range is used again once its owner is over, or has
retired the layout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from gradwire.engine.identity import RANGES
from gradwire.errors import ConfigError

if TYPE_CHECKING:
    from gradwire.engine.owner import Owner


class Ranges:
    """The ranges of one process group, as this rank knows them.

    Args:
        first: (key, value) -> the value of the rank that came first; see `control.Member`.
    """

    def __init__(self, first: Callable[[str, bytes], bytes]) -> None:
        self._first = first
        self._lock = threading.Lock()
        self._number: dict[str, int] = {}  # of all claims up to the last that was looked at
        self._used: dict[int, tuple[Owner, str]] = {}

    def claim(self, owner: Owner, layout: str) -> int:
        """The range of a layout of `owner`; it may ask the store several times.

        Raises:
            ConfigError: as many are in use as there are.
        """
        key = f"{owner.key}/{layout}"
        with self._lock:
            while key not in self._number:
                number = len(self._number)
                held = self._first(f"range/{number}", key.encode()).decode()
                self._number[held] = number
            place = self._number[key] % (RANGES - 1)
            other, held = self._used.get(place, (owner, layout))
            if (other, held) != (owner, layout) and not (other.over or held in other.retired):
                raise ConfigError(
                    f"the handles of one process group have {RANGES - 1} layouts of buckets at a "
                    "time: detach those that are not needed"
                )
            owner.retired.discard(layout)
            self._used[place] = owner, layout
        return place
