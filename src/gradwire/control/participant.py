"""One rank's part in one group, on the thread of the group's store: its place, and its meetings.

The ranks of a group meet in the same incarnation of it. A group may be made anew over a store that
still holds an earlier incarnation's keys, and requests of processes that died or of ranks that are
ahead. So rank 0 gives each incarnation a random name, and a rank learns the name as the answer to a
request with its own random token: no earlier entry can be mistaken for the answer. Each place is
taken once (compare-and-set), so a rank that returns early does not re-enter the incarnation that it
has left. A request carries how often the rank has joined this group through its Channel, and rank 0
answers requests that have its own count: so ranks that pass through the same incarnations at
different times meet in the right ones.

Meetings, exchanges and agreements, end when every rank has come, and an agreement as soon as two
ranks that differ have. Each rank writes what it has, and increments a counter; the last publishes.
In an exchange all then read what the others have. In an agreement a rank writes its digest; the
first to come writes its description, too, and so does a rank that differs from it, which is not
counted, and publishes that it differs. Who hears of it reads that rank's description.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from gradwire.control import liveness
from gradwire.control.connection import Connection
from gradwire.control.description import difference, hashed, number, packed, unpacked
from gradwire.control.keys import Journal, Namespace
from gradwire.errors import ConfigError, TransportError

log = logging.getLogger("gradwire")

# Called on the store's thread, with None, or why there is no store; whether it was waited for then.
Command = Callable[[TransportError | None], object]

_GROUP_KEY = "gradwire/control"
_NAMING_S = 2.0  # time in which the ranks that have not come are found
_NAMED = 8  # the most missing ranks that an error names
_REMEMBERED = 1024  # the most differences remembered for agreements that this rank has not reached
_DIGITS = 64  # of a digest


class Participant:
    """One rank's part in one group, on the thread of the group's store.

    Args:
        connection: to the group's store.
        post: runs a function on the control thread.
        heard: called there with the sender and the notice that it has told.
        timeout: seconds after which an entry is given up that is counted and not written.

    Attributes:
        settled: whether this rank has its place in the group, and the store.
        space: the incarnation's keys, while it is settled.
        ranks: of the group, as keys.
        open: this rank's meetings that have not ended, by key; used from any thread.
        differing: who differs in agreements that this rank has not reached, by key.
    """

    def __init__(
        self,
        connection: Connection,
        post: Callable[[Callable[[], None]], None],
        heard: Callable[[int, Mapping[str, Any]], None],
        rank: int,
        world_size: int,
        timeout: float,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.ranks = [str(rank) for rank in range(world_size)]
        self.connection, self.post = connection, post
        self.settled = False
        self.space: Namespace
        self.open: dict[str, Meeting] = {}
        self.differing: dict[str, int] = {}
        self._heard, self._timeout = heard, timeout
        self._token = secrets.token_hex(8)  # rank 0's names the incarnation
        self._answered: set[int] = set()  # ranks, by rank 0
        self._known: dict[int, liveness.Process] = {}  # of ranks on this machine
        self._queued: deque[Command] = deque()
        self._over: str | None = None  # why this rank's part has ended
        self._warned = False

    def begin(self, store: Any, attempts: dict[tuple[str, int], int]) -> None:
        """Ask for this rank's place.

        Args:
            store: the group's own, with its prefixes; not kept.
            attempts: (group, rank) -> how often it has joined; incremented here.
        """
        connection, rank = self.connection, self.rank
        if connection.gone is not None:
            self.lost(connection.gone)
            return
        connection.participants[self.look] = self.lost
        connection.world_size = max(connection.world_size, self.world_size)
        # The only key under the group's own prefixes: a random name for the group.
        named = connection.prefixed(store).compare_set(_GROUP_KEY, "", secrets.token_hex(8))
        group = named.decode()
        self._attempt = attempts[group, rank] = attempts.get((group, rank), 0) + 1
        space = connection.root.below(f"groups/{group}")
        self._answers = space.below("answers")
        self._requests = Journal(space.below("requests"), self._timeout)
        if rank != 0:
            request = {"rank": rank, "attempt": self._attempt, "token": self._token}
            self._requests.append(json.dumps(request).encode())
        connection.ring(here=True)

    def when_settled(self, command: Command) -> None:
        """Run `command` as soon as this rank has its place, or has lost the store."""
        if self.settled:
            command(None)
        elif self._over is not None:
            command(self.error(self._over))
        else:
            self._queued.append(command)

    def publish(self, kind: str, what: Any, error: TransportError | None = None) -> None:
        """Append to the news that all others read; see `Command`."""
        if error is None:
            self._news.append(json.dumps({"from": self.rank, kind: what}).encode())
            self.connection.ring()

    def ended(self) -> dict[int, list[str]]:
        """The ranks of `dead`, each with the open meetings that it has not reached; one small store
        operation if there is nothing new, and one for each meeting."""
        try:
            self._read(self._processes, self._know)
        except ValueError as error:
            self.garbled(str(error).encode())
        meetings = list(self.open.values())
        return {rank: [m.what for m in meetings if m.lacks(rank)] for rank in self.dead()}

    def dead(self) -> list[int]:
        """The ranks on this machine that are known to have ended; thread-safe."""
        known = list(self._known.items())
        return [rank for rank, process in known if liveness.has_ended(*process)]

    def leave(self, notice: Mapping[str, Any]) -> None:
        """Leave the group; `notice` is the last that peers hear."""
        self.connection.participants.pop(self.look, None)
        if self.settled:
            self.publish("told", notice)
            self.connection.ring(here=True)  # ranks may be threads that share it
        self.lost("this rank has left the group")

    def look(self, rung: bool) -> bool:
        """Read new entries, if there are any, or some were not complete; see `Connection`."""
        try:
            if rung and not self.settled:
                self._settle()
            if self.settled and (rung or self._news.unwritten or self._requests.unwritten):
                if self.rank == 0:
                    self._read(self._requests, self._answer)
                self._read(self._news, self._learn)
            for meeting in list(self.open.values()):
                if meeting.other is not None:
                    meeting.compare(meeting.other)
        except ValueError as error:
            self.connection.participants.pop(self.look)
            reason = f"the group's store holds invalid data ({error})"
            if self.lost(reason):
                log.warning("gradwire: rank %d: %s", self.rank, reason)
            return False
        expects = self.rank == 0 and len(self._answered) < self.world_size - 1
        return not self.settled or bool(self.open or self._news.unwritten) or expects

    def lost(self, reason: str) -> bool:
        """Fail what is pending, and drop the store; whether anything was pending."""
        self._over = self._over or reason
        self.settled = False
        for held in ("_answers", "_requests", "space", "_news", "_processes"):
            vars(self).pop(held, None)  # they hold the store
        meetings = list(self.open.values())
        for meeting in meetings:
            meeting.end(None, self.error(reason))
        queued, self._queued = self._queued, deque()
        waited = [command(self.error(reason)) for command in queued]
        return bool(meetings) or any(waited)

    def error(self, reason: str, peer: int | None = None) -> TransportError:
        return TransportError(f"rank {self.rank}: {reason}", peer)

    def garbled(self, entry: bytes) -> None:
        """Warn of an entry that cannot be parsed, once."""
        if not self._warned:
            self._warned = True
            log.warning(
                "gradwire: rank %d ignores entries in the group's store that it cannot parse; "
                "another program writes there (this warning appears once): %r",
                self.rank,
                entry[:80],
            )

    # ---- inside

    def _settle(self) -> None:
        """Take this rank's place in the incarnation, if rank 0 has told its name."""
        token = self._token.encode()
        name = token if self.rank == 0 else self._answers.read(self._token)
        if name is None or not re.fullmatch(rb"[0-9a-f]{16}", name):
            return
        space = self.connection.root.below(f"incarnations/{name.decode()}")
        if space.below("places").first(str(self.rank), token) != token:
            return  # another has it: rank 0 of the next incarnation may answer, too
        self.space = space
        self._news = Journal(space.below("news"), self._timeout)
        here = space.below("processes").below(liveness.machine())
        self._processes = Journal(here, self._timeout)
        self._processes.append(json.dumps([self.rank, *liveness.own()]).encode())
        self.settled = True
        while self._queued:
            self._queued.popleft()(None)

    def _read(self, journal: Journal, handle: Callable[[Any], None]) -> None:
        """Handle what is new in a journal, as JSON."""
        for entry in journal.new():
            try:
                handle(json.loads(entry))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                self.garbled(entry)

    def _know(self, told: Any) -> None:
        """A rank of this machine has told its process."""
        rank, process, started = map(int, told)
        self._known[rank] = process, started

    def _answer(self, asked: Any) -> None:
        """At rank 0: answer a request with the incarnation's name."""
        rank, attempt, token = int(asked["rank"]), asked["attempt"], str(asked["token"])
        if attempt == self._attempt:
            self._answers.write(token, self._token.encode())
            self._answered.add(rank)
            self.connection.ring()

    def _learn(self, news: Any) -> None:
        sender, key = news["from"], news.get("met", news.get("differs"))
        if type(sender) is not int or not 0 <= sender < self.world_size:
            raise ValueError
        if sender == self.rank:
            return
        if isinstance(notice := news.get("told"), dict):
            self.post(partial(self._heard, sender, notice))
        elif not isinstance(key, str):
            raise ValueError
        elif (meeting := self.open.get(key)) is None or not meeting.started:
            if "differs" in news and len(self.differing) < _REMEMBERED:
                self.differing.setdefault(key, sender)
        elif "differs" not in news:
            meeting.complete()
        elif meeting.other is None:  # else this rank differs, and has another to compare with
            meeting.compare(sender)


class Meeting(Future[Any]):
    """An exchange or agreement of this rank: a future that completes on the control thread.

    Args:
        part: this rank's in the group.
        shown: what it fails with, for an error in the group's own ranks.
        key: its name on all ranks.
        what: the subject, for errors such as "rank 1 did not reach {what}".
        timeout: seconds from now until it fails.
        mine: what this rank has for an exchange.
        lines: of its description; None: an exchange.

    Attributes:
        started: whether this rank has begun to write what it has.
        late: whether the deadline has passed, and missing ranks are looked for.
        other: a rank that is known to differ.
    """

    def __init__(
        self,
        part: Participant,
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
        self.started = self.late = False
        self.other: int | None = None
        self._part, self._shown = part, shown

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        """End, unless it has; from any thread."""
        if self._part.open.get(self.key) is self:
            self._part.open.pop(self.key, None)
        self._part.post(partial(self._end, result, error))

    def _end(self, result: Any, error: BaseException | None) -> None:
        if self.done():
            return
        if error is None:
            self.set_result(result)
        else:
            self.set_exception(self._shown(error))

    def overdue(self) -> None:
        """The deadline has passed: find the ranks that have not come; and end, if that is late."""
        if not self.late:
            self.late = True
            self.deadline += _NAMING_S
            self._part.connection.submit(self._expire)
        else:
            text = f"{self.what} did not complete within {self.timeout:g} s, and the group's store"
            self.end(None, self._part.error(f"{text} does not answer"))

    # ---- on the store's thread

    def start(self, error: TransportError | None) -> None:
        """Write what this rank has, if it has the store; see `Command`."""
        part, key = self._part, self.key
        if error is not None:
            self.end(None, error)
        if part.open.get(key) is not self:
            return
        self.started, space = True, self._space()
        mine = first = self.mine
        if self.lines is not None:
            held = b"%s %d" % (mine, part.rank)
            first = space.first("first", held)
            if first == held or first[:_DIGITS] != mine:
                mine += packed(self.lines)
        space.write(str(part.rank), mine)
        if self.lines is not None and first[:_DIGITS] != self.mine:
            part.publish("differs", key)
            holder = re.fullmatch(rb"[0-9a-f]{64} ([0-9]{1,9})", first)
            if holder is None:
                part.garbled(first)
            else:
                self.compare(int(holder[1]))
        elif key in part.differing:
            self.compare(part.differing.pop(key))
        elif space.add("n") == part.world_size:
            part.publish("met", key)
            self.complete()

    def complete(self, look: bool = False) -> None:
        """End, as all have come.

        Raises:
            ValueError: the store shows otherwise; of an agreement it is asked only with `look`.
        """
        every: list[bytes] | None = []
        if look or self.lines is None:
            every = self._space().read_all(self._part.ranks)
        mine = b"" if self.lines is None else self.mine
        if every is None or not all(held.startswith(mine) for held in every):
            raise ValueError
        self.end(every if self.lines is None else number(hashed(self.lines)))

    def compare(self, other: int) -> None:
        """Fail an agreement, because `other` differs, once its description can be read."""
        if self.lines is None:
            return  # it is an exchange: the entry was false
        self.other = other
        held = self._space().read(str(other))
        if held is None:
            return  # not written yet
        if held.startswith(self.mine):
            self.other = None  # the entry was false
            self._part.garbled(held)
            return
        try:
            theirs = unpacked(held[_DIGITS:])
        except ValueError:
            self._part.garbled(held)
            theirs = ["(unreadable)"]
        self.end(None, ConfigError(difference(self._part.rank, self.lines, other, theirs)))

    def lacks(self, dead: int) -> bool:
        """Whether a rank that has died has not come. What all have reached ends: the last may have
        died before it could publish so."""
        lacks = self._space().read(str(dead)) is None
        with suppress(ValueError):
            if not lacks:
                self.complete(look=True)
        return lacks

    def _expire(self) -> None:
        """Fail, as it has timed out, with the ranks that have not come."""
        part, what, other, missing = self._part, self.what, self.other, [0]
        peer: int | None = None
        if part.settled:
            missing = self._space().missing(part.ranks, _NAMED + 1)
        if other is not None:
            reason, peer = f"rank {other} has a different {what}, and has not described it", other
        elif missing:
            peer, named = missing[0], ", ".join(map(str, missing[:_NAMED]))
            who = f"rank {named}" if len(missing) == 1 else f"ranks {named}"
            reason = (
                f"{who}{' and others' * (len(missing) > _NAMED)} did not reach {what} within "
                f"{self.timeout:g} s. Check that the process is alive and makes the same calls"
            )
        else:
            reason = (
                f"{what} timed out after {self.timeout:g} s, as the last rank came, and other "
                "ranks may have completed it: give the group a longer timeout"
            )
        self.end(None, part.error(reason, peer))

    def _space(self) -> Namespace:
        return self._part.space.below(f"meetings/{self.key}")
