"""One rank's part in one group, in the group's store; all of it runs on the store's thread."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from gradwire.control.agreements import Agreements, Exchanges, Incarnation
from gradwire.control.connection import Connection
from gradwire.control.description import Description
from gradwire.control.journal import Journal
from gradwire.control.liveness import Processes
from gradwire.control.pending_result import PendingResult
from gradwire.control.rendezvous import Rendezvous
from gradwire.errors import TransportError

log = logging.getLogger("gradwire")

Fail = Callable[[Exception], None]


class _Settled:
    """The state of a rank that has its place in an incarnation."""

    def __init__(self, incarnation: Incarnation, news: Journal) -> None:
        self.space = incarnation.space
        self.news = news
        self.exchanges = Exchanges(incarnation)
        self.agreements = Agreements(incarnation)


class Participant:
    """One rank's part in one group.

    Args:
        connection: to the store's server.
        store: the group's; `begin` drops it.
        rank, world_size: in the group.
        timeout: seconds that peers have.
        attempts: see `Rendezvous`.
        hear: called with (sender, notice).

    Attributes:
        processes: of ranks on this machine; None: this rank has had no place yet.
    """

    def __init__(
        self,
        connection: Connection,
        store: Any,
        rank: int,
        world_size: int,
        timeout: float,
        attempts: dict[tuple[str, int], int],
        hear: Callable[[int, Mapping[str, Any]], None],
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._connection = connection
        self._store: Any = store
        self._timeout = timeout
        self._attempts = attempts
        self._hear = hear
        self.processes: Processes | None = None
        self._rendezvous: Rendezvous | None = None
        self._settled: _Settled | None = None
        self._queued: deque[tuple[Callable[[], None], Fail | None]] = deque()
        self._ended: str | None = None  # why this rank's part has ended
        self._warned = False

    # ---- joining and leaving

    def begin(self) -> None:
        store, self._store = self._store, None
        if self._connection.gone is not None:
            self.lost(self._connection.gone)
            return
        self._connection.participants.append(self)
        self._rendezvous = Rendezvous(
            self._connection.root,
            self._connection.prefixed(store),
            self.rank,
            self._attempts,
            self._timeout,
            self._garbled,
        )
        self._connection.ring()
        self._connection.look()

    @property
    def settled(self) -> bool:
        """Whether this rank has its place in the group; thread-safe."""
        return self._settled is not None

    def when_settled(self, command: Callable[[], None], fail: Fail | None) -> None:
        """Run `command` once this rank has its place, or `fail` if it never gets one."""
        if self._ended is not None:
            if fail is not None:
                fail(self._error(self._ended))
        elif self._settled is None:
            self._queued.append((command, fail))
        else:
            command()

    def leave(self, notice: str) -> None:
        if self in self._connection.participants:
            self._connection.participants.remove(self)
        if self._settled is not None and self._ended is None:
            self.tell(notice)
            self._connection.look()  # ranks may be threads of one process, on one connection
        self._end("this rank has left the group")

    # ---- operations with peers; once settled

    def tell(self, notice: str) -> None:
        """Send `notice`, JSON, to all others."""
        assert self._settled is not None
        self._settled.news.append(f'{{"from": {self.rank}, "told": {notice}}}'.encode())
        self._connection.ring()

    def exchange(self, key: str, mine: bytes, pending: PendingResult[list[bytes]]) -> None:
        if self._settled is not None and not pending.over:
            self._settled.exchanges.start(key, mine, pending)

    def agree(self, key: str, mine: Description, pending: PendingResult[int]) -> None:
        if self._settled is not None and not pending.over:
            self._settled.agreements.start(key, mine, pending)

    def expire(self, pending: PendingResult[Any]) -> None:
        """`pending` has timed out: fail it with the ranks that have not come."""
        if self._ended is not None:
            return  # it has failed with that reason
        if self._settled is None:
            pending.fail_without([0])
            return
        self._settled.exchanges.expire(pending)
        self._settled.agreements.expire(pending)

    def first(self, key: str, value: bytes, reply: Future[bytes]) -> None:
        assert self._settled is not None
        try:
            reply.set_result(self._settled.space.below("firsts").first(key, value))
        except Exception as error:
            reply.set_exception(self._error(str(error)))
            raise

    def ended(self, reply: Future[dict[int, list[str]]]) -> None:
        """The peers of this machine whose processes have ended, each with the exchanges and
        agreements of this rank that it has not reached."""
        settled, processes = self._settled, self.processes
        assert settled is not None
        assert processes is not None
        processes.read()
        reply.set_result(
            {
                rank: settled.exchanges.lacking(rank) + settled.agreements.lacking(rank)
                for rank in processes.ended()
            }
        )

    # ---- for the connection

    @property
    def waits(self) -> bool:
        if self._settled is None or self._rendezvous is None:
            return True
        return (
            bool(self._settled.exchanges.pending or self._settled.agreements.pending)
            or self._settled.news.has_gaps
            or (self.rank == 0 and self._rendezvous.expects(self.world_size))
        )

    @property
    def must_poll(self) -> bool:
        if self._settled is None or self._rendezvous is None:
            return False
        return (
            self._settled.news.has_gaps
            or self._settled.agreements.must_poll
            or (self.rank == 0 and self._rendezvous.has_gaps)
        )

    def look(self) -> None:
        try:
            self._look()
        except ValueError as error:
            self._connection.participants.remove(self)
            reason = f"the group's store holds invalid data ({error})"
            if self._end(reason):
                log.warning("gradwire: rank %d: %s", self.rank, reason)

    def lost(self, reason: str) -> bool:
        return self._end(reason)

    # ---- inside

    def _look(self) -> None:
        assert self._rendezvous is not None
        if self._settled is None:
            space = self._rendezvous.find()
            if space is None:
                return
            self._settle(space)
            assert self._settled is not None
        if self.rank == 0 and self._rendezvous.answer():
            self._connection.ring()
        for entry in self._settled.news.new():
            self._read(self._settled, entry)
        self._settled.agreements.look()

    def _settle(self, space: Any) -> None:
        news = Journal(space.below("news"), self._timeout)

        def publish(kind: str, key: str) -> None:
            news.append(json.dumps({"from": self.rank, kind: key}).encode())
            self._connection.ring()

        incarnation = Incarnation(self.rank, self.world_size, space, publish, self._garbled)
        of = self.rank, self._timeout, self._garbled
        self.processes = Processes(space.below("processes"), *of)
        self._settled = _Settled(incarnation, news)
        while self._queued:
            command, _ = self._queued.popleft()
            command()

    def _read(self, settled: _Settled, entry: bytes) -> None:
        try:
            news = json.loads(entry)
            sender = news["from"]
            if type(sender) is not int or not 0 <= sender < self.world_size:
                raise ValueError
            if sender == self.rank:
                return
            if isinstance(notice := news.get("told"), dict):
                self._hear(sender, notice)
            elif isinstance(key := news.get("exchanged"), str):
                settled.exchanges.complete(key)
            elif isinstance(key := news.get("agreed"), str):
                settled.agreements.complete(key)
            elif isinstance(key := news.get("differs"), str):
                settled.agreements.differ(key, sender)
            else:
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self._garbled(entry)

    def _garbled(self, entry: bytes) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "gradwire: rank %d ignores entries in the group's store that it cannot parse; "
                "another program writes there (this warning appears once): %r",
                self.rank,
                entry[:80],
            )

    def _end(self, reason: str) -> bool:
        """Fail what is pending, and drop the store; whether anything was pending."""
        self._ended = self._ended or reason
        fails = [fail for _, fail in self._queued if fail is not None]
        self._queued.clear()
        settled = self._settled
        if settled is not None:
            fails += [pending.fail for pending in settled.exchanges.pending]
            fails += [pending.fail for pending in settled.agreements.pending]
        self._settled = self._rendezvous = None
        if self.processes is not None:
            self.processes.drop()
        for fail in fails:
            fail(self._error(reason))
        return bool(fails)

    def _error(self, reason: str) -> TransportError:
        return TransportError(f"rank {self.rank}: {reason}")
