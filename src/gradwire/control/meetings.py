"""Meetings of ranks: exchanges and agreements. They end when every rank has come, and an agreement
as soon as two ranks that differ have.

Each rank writes what it has, and increments a counter; the last publishes. In an exchange all then
read what the others have. In an agreement a rank writes its digest; the first to come writes its
description, too, and so does a rank that differs from it, which is not counted, and publishes that
it differs. Who hears of it reads that rank's description.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from gradwire.control.description import difference, hashed, number, packed, unpacked
from gradwire.control.namespace import Namespace
from gradwire.errors import ConfigError, TransportError

_NAMED = 8  # the most missing ranks that an error names
_REMEMBERED = 1024  # the most differences remembered for agreements that this rank has not reached
_DIGITS = 64  # of a digest


class Meeting(Future[Any]):
    """A meeting of this rank: a future that completes on the control thread.

    Args:
        post: runs a function on the control thread.
        shown: what it fails with, for an error in the group's own ranks.
        key: its name on all ranks.
        what: the subject, for errors such as "rank 1 did not reach {what}".
        timeout: seconds from now until it fails.
        mine: what this rank has for an exchange.
        lines: of its description; None: an exchange.

    Attributes:
        late: whether the deadline has passed, and missing ranks are looked for.
        other: a rank that is known to differ.
    """

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        shown: Callable[[BaseException], BaseException],
        key: str,
        what: str,
        timeout: float,
        mine: bytes,
        lines: Sequence[str] | None,
    ) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # it cannot be cancelled
        self.key, self.what, self.timeout, self.lines = key, what, timeout, lines
        self.mine = mine if lines is None else hashed(lines).hex().encode()
        self.since = time.monotonic()
        self.deadline = self.since + timeout
        self.late = False
        self.other: int | None = None
        self._post, self._shown = post, shown

    def succeed(self, result: Any) -> None:
        self._post(partial(self.end, result))

    def fail(self, error: BaseException) -> None:
        self._post(partial(self.end, None, error))

    def end(self, result: Any, error: BaseException | None = None) -> None:
        """End at once, unless it has; on the control thread."""
        if self.done():
            return
        if error is None:
            self.set_result(result)
        else:
            self.set_exception(self._shown(error))


class Meetings:
    """The open meetings of a rank in an incarnation of its group; on the store's thread.

    Args:
        space: the keys of all meetings.
        publish: appends (kind, key) to this rank's news.
        garbled: called with an entry that cannot be parsed.

    Attributes:
        open: by key.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        space: Namespace,
        publish: Callable[[str, str], None],
        garbled: Callable[[bytes], None],
    ) -> None:
        self.open: dict[str, Meeting] = {}
        self._rank, self._world_size, self._root = rank, world_size, space
        self._publish, self._garbled = publish, garbled
        self._ranks = [str(rank) for rank in range(world_size)]
        self._differing: dict[str, int] = {}  # by key, before this rank has come

    def pending(self) -> list[Meeting]:
        """Those that have not ended: an error of the group ends them all."""
        return [meeting for meeting in self.open.values() if not meeting.done()]

    def start(self, meeting: Meeting) -> None:
        key, space = meeting.key, self._space(meeting.key)
        if key in self.open:
            text = f"rank {self._rank} uses the key '{key}' twice: use each once"
            meeting.fail(ConfigError(text))
            return
        self.open[key] = meeting
        mine, first = meeting.mine, meeting.mine
        if meeting.lines is not None:
            held = b"%s %d" % (mine, self._rank)
            first = space.first("first", held)
            if first == held or first[:_DIGITS] != mine:
                mine += packed(meeting.lines)
        space.write(str(self._rank), mine)
        if meeting.lines is not None and first[:_DIGITS] != meeting.mine:
            self._publish("differs", key)
            holder = re.fullmatch(rb"[0-9a-f]{64} ([0-9]{1,9})", first)
            if holder is None:
                self._garbled(first)
            else:
                self._compare(meeting, int(holder[1]))
        elif key in self._differing:
            self._compare(meeting, self._differing.pop(key))
        elif space.add("n") == self._world_size:
            self._publish("met", key)
            self.complete(key)

    def complete(self, key: str) -> None:
        """A rank has published that all have come, and agree.

        Raises:
            ValueError: the store shows otherwise.
        """
        meeting = self.open.get(key)
        if meeting is not None and not self._completed(meeting, look=meeting.lines is None):
            raise ValueError

    def differ(self, key: str, sender: int) -> None:
        """Rank `sender` has published that it differs from the first."""
        meeting = self.open.get(key)
        if meeting is None:
            if len(self._differing) < _REMEMBERED:
                self._differing.setdefault(key, sender)
        elif meeting.other is None:  # else this rank differs, and has another to compare with
            self._compare(meeting, sender)

    def look(self) -> None:
        """Compare with ranks that differ, if their descriptions have been written."""
        for meeting in list(self.open.values()):
            if meeting.other is not None:
                self._compare(meeting, meeting.other)

    @property
    def must_poll(self) -> bool:
        return any(meeting.other is not None for meeting in self.open.values())

    def expire(self, meeting: Meeting) -> None:
        """Fail a meeting that has timed out with the ranks that have not come."""
        if self.open.get(meeting.key) is not meeting:
            return
        del self.open[meeting.key]
        what, other = meeting.what, meeting.other
        missing = self._space(meeting.key).missing(self._ranks, _NAMED + 1)
        if other is not None:
            reason = f"rank {other} has a different {what}, and has not described it"
            meeting.fail(TransportError(f"rank {self._rank}: {reason}", other))
        elif missing:
            meeting.fail(did_not_come(self._rank, meeting, missing))
        else:
            reason = (
                f"{what} timed out after {meeting.timeout:g} s, as the last rank came, and other "
                "ranks may have completed it: give the group a longer timeout"
            )
            meeting.fail(TransportError(f"rank {self._rank}: {reason}"))

    def lacking(self, dead: int) -> list[str]:
        """What is open, and was not reached by a rank that has died. What all have reached ends:
        the last may have died before it could publish so."""
        found = []
        for key, meeting in list(self.open.items()):
            if self._space(key).read(str(dead)) is None:
                found.append(meeting.what)
            else:
                self._completed(meeting, look=True)
        return found

    def _completed(self, meeting: Meeting, look: bool) -> bool:
        """End a meeting to which all have come; with `look` only if the store shows so."""
        every = self._space(meeting.key).read_all(self._ranks) if look else []
        mine = b"" if meeting.lines is None else meeting.mine
        if every is None or not all(held.startswith(mine) for held in every):
            return False
        del self.open[meeting.key]
        meeting.succeed(every if meeting.lines is None else number(bytes.fromhex(mine.decode())))
        return True

    def _compare(self, meeting: Meeting, other: int) -> None:
        """Fail an agreement, because `other` differs, once its description can be read."""
        if meeting.lines is None:
            return  # it is an exchange: the entry was false
        meeting.other = other
        held = self._space(meeting.key).read(str(other))
        if held is None:
            return  # not written yet
        if held.startswith(meeting.mine):
            meeting.other = None  # the entry was false
            self._garbled(held)
            return
        try:
            theirs = unpacked(held[_DIGITS:])
        except ValueError:
            self._garbled(held)
            theirs = ["(unreadable)"]
        del self.open[meeting.key]
        meeting.fail(ConfigError(difference(self._rank, meeting.lines, other, theirs)))

    def _space(self, key: str) -> Namespace:
        return self._root.below(key)


def did_not_come(rank: int, meeting: Meeting, missing: Sequence[int]) -> TransportError:
    """The error of a meeting that ranks, of which the first are named, have not come to in time."""
    named = ", ".join(map(str, missing[:_NAMED]))
    who = f"rank {named}" if len(missing) == 1 else f"ranks {named}"
    return TransportError(
        f"rank {rank}: {who}{' and others' * (len(missing) > _NAMED)} did not reach {meeting.what} "
        f"within {meeting.timeout:g} s. Check that the process is alive and makes the same calls",
        peer=missing[0],
    )
