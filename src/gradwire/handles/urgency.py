"""The order in which a pass sends its scopes, where the next forward waits for the first layers.

Backward ends with the gradients that the next forward needs first. So scopes that the network would
not have begun before the end of backward wait until then, and go in the order of the forward (P3,
ByteScheduler). How many go before is counted once, and agreed: all ranks have one order, which
stays if the slowest rank's steps are faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from gradwire.decide.scripts import UNTIMED, Passes, Script, Tell, Use
from gradwire.handles.coalescing import Share
from gradwire.planner import Plan

Scope = list[Share]

_SETTLING = 3  # passes: connections open, and DDP rebuilds its buckets
_COUNTED = 5  # passes


class Urgency:
    """The scopes of one module's passes.

    Args:
        window: how many may be in flight.

    Attributes:
        eager: how many go as they come; None: all.
        ended: how many of this pass have ended.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self.eager: int | None = None
        self.ended = 0
        self._come = 0
        self._held: list[Scope] = []
        self._seen: list[tuple[int, int]] = []  # (ended as backward did, all), of the last passes

    def begin(self) -> None:
        """A pass begins."""
        self.ended = self._come = 0
        self._held.clear()

    def order(self, due: Sequence[Scope], is_last: bool) -> list[Scope]:
        """The scopes to send now.

        Args:
            due: those that are complete.
        """
        eager = len(due) if self.eager is None else max(0, self.eager - self._come)
        self._come += len(due)
        self._held += due[eager:]
        now = [*due[:eager]]
        if is_last:
            now += reversed(self._held)
            self._held.clear()
        return now

    def note(self) -> None:
        """Backward has ended."""
        self._seen = [*self._seen[1 - _COUNTED :], (self.ended, self._come)]

    def script(self, key: str) -> Script:
        """Counts, agrees with the other ranks, and keeps the order if steps are faster."""
        plain = yield Passes(_SETTLING + _COUNTED)
        seen = [*self._seen]
        begun = self._window + max((ended for ended, _ in seen), default=0)
        told = yield Tell(f"{key}/urgency", [begun, sorted({come for _, come in seen})])
        eager, come = max(begun for begun, _ in told), told[0][1]
        if any(one != come for _, one in told) or len(come) != 1 or eager >= come[0] - 1:
            return
        yield Use(_as_it_is, partial(self._send, eager))
        yield Passes(UNTIMED - 1)
        ordered = yield Passes(_COUNTED)
        seconds = [median(one.seconds for one in of[-_COUNTED:]) for of in (plain, ordered)]
        every = yield Tell(f"{key}/urgency gains", seconds)
        if max(after for _, after in every) >= max(before for before, _ in every):
            yield Use(_as_it_is, partial(self._send, None))

    def _send(self, eager: int | None) -> None:
        self.eager = eager


def _as_it_is(plan: Plan) -> Plan:
    return replace(plan, version=plan.version + 1)
