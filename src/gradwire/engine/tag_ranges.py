"""Tag ranges: each layout of an owner has one, the same on all ranks.

Ranks may meet layouts in different orders. A rank that needs a range for a layout claims the next
free one by compare-and-set in the group's store, and learns the holders of those before it. Range
numbers only grow; tags carry them modulo `RANGES`, and a range is reused once its owner is finished
or has retired the layout.
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


class TagRanges:
    """The tag ranges of one process group, as this rank knows them.

    Args:
        first: (key, value) -> the value that a rank wrote first; see `control.Member.first`.
    """

    def __init__(self, first: Callable[[str, bytes], bytes]) -> None:
        self._first = first
        self._lock = threading.Lock()
        self._number: dict[str, int] = {}  # of all claims that this rank has read
        self._used: dict[int, tuple[weakref.ref[Owner], str]] = {}

    def claim(self, owner: Owner, layout: str) -> int:
        """The range of a layout of `owner`; may take several store operations.

        Raises:
            ConfigError: all ranges are in use.
        """
        key = f"{owner.key}/{layout}"
        with self._lock:
            while key not in self._number:
                number = len(self._number)
                held = self._first(f"range/{number}", key.encode()).decode()
                self._number[held] = number
            place = self._number[key] % (RANGES - 1)
            holder, held = self._used.get(place, (weakref.ref(owner), layout))
            other = holder()
            if not (
                other is None
                or (other, held) == (owner, layout)
                or other.over
                or held in other.retired
            ):
                raise ConfigError(
                    f"the handles of one process group have {RANGES - 1} layouts of buckets in "
                    "use, which is the most: detach handles that are not needed"
                )
            owner.retired.discard(layout)
            self._used[place] = weakref.ref(owner), layout
        return place
