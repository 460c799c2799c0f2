"""Tag ranges: each program of an owner has one, the same on all ranks.

Ranks may meet programs in different orders. A rank that needs a range claims the next free number
by compare-and-set in the group's store, and learns the holders of those before it. Numbers only
grow; tags carry them modulo `RANGES`, and a number whose place is in use is left out. A place is
used again once its owner is finished, or nobody holds the program: ranks drop programs with the
same plan, so who finds a claim by another rank takes it, though its own drop may be about to come.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from gradwire.engine.identity import RANGES
from gradwire.errors import ConfigError

if TYPE_CHECKING:
    from gradwire.engine.owner import Owner


_LEFT_OUT = "-"


class TagRanges:
    """The tag ranges of one process group, as this rank knows them.

    Args:
        first: (key, value) -> the value that a rank wrote first; see `control.Member.first`.
    """

    def __init__(self, first: Callable[[str, bytes], bytes]) -> None:
        self._first = first
        self._lock = threading.Lock()
        self._read = 0  # claims that this rank has read
        self._number: dict[str, int] = {}  # by what has claimed it
        self._used: dict[int, tuple[int, weakref.ref[Owner], str]] = {}  # place -> number, holder

    def claim(self, owner: Owner, layout: str) -> int:
        """The range of a layout of `owner`; may take several store operations.

        Raises:
            ConfigError: all ranges are in use.
        """
        key = f"{owner.key}/{layout}"
        with self._lock:
            last = self._read + RANGES
            while key not in self._number:
                number = self._read
                mine = key if self._is_free(number) else _LEFT_OUT
                held = self._first(f"range/{number}", mine.encode()).decode()
                self._read += 1
                if held != _LEFT_OUT:
                    self._number[held] = number
                elif number == last:
                    raise ConfigError(
                        f"the handles of one process group have {RANGES - 1} layouts of buckets in "
                        "use, which is the most: detach handles that are not needed"
                    )
            number = self._number[key]
            place = number % (RANGES - 1)
            later, *_ = self._used.get(place, (number,))
            if later > number and not self._is_free(number):
                raise ConfigError(
                    f"a layout of buckets comes back after {RANGES - 1} others, and its messages' "
                    "tags are in use: detach a handle, or make the process group anew"
                )
            self._used[place] = number, weakref.ref(owner), layout
        return place

    def _is_free(self, number: int) -> bool:
        if number % (RANGES - 1) not in self._used:
            return True
        _, owner, layout = self._used[number % (RANGES - 1)]
        other = owner()
        return other is None or other.over or other.held.get(layout, 1) <= 0
