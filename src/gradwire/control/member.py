"""One rank's membership in one group: the interface of the control channel.

Commands go to the thread of the group's store, and wait there until this rank has its place in an
incarnation of the group. Futures complete, and listeners are called, on the control thread.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gradwire.control.connection import Connection
from gradwire.control.description import described
from gradwire.control.journal import Journal
from gradwire.control.liveness import Processes
from gradwire.control.meetings import Meeting, Meetings, did_not_come
from gradwire.control.namespace import Namespace
from gradwire.control.rendezvous import Rendezvous
from gradwire.errors import ConfigError, TransportError, in_global_ranks

if TYPE_CHECKING:
    from gradwire.control.channel import Channel

log = logging.getLogger("gradwire")

T = TypeVar("T")
Fail = Callable[[Exception], None]

_MOST_BYTES = 4 << 20  # a TCPStore closes a connection that writes 8 MiB
_MOST_NOTICE = 1 << 16
_NAMING_S = 2.0
_ANSWER_S = 1.0


class Listener(Protocol):
    """Callbacks of a member, on the control thread: they must not block.

    Exceptions are logged and otherwise ignored.
    """

    def heard(self, sender: int, notice: Mapping[str, Any]) -> None:
        """Rank `sender` of the group has sent `notice`; a sender's notices arrive in order."""

    def tick(self) -> None:
        """Called about every 0.2 s from `join` until `leave`."""


class Member:
    """One rank's membership in one group; made by `Channel.join`; used from any thread.

    Attributes:
        ranks: of the group's members in the whole job, for errors; None: they are equal.
        settled: whether this rank has its place in the group, and the store.
    """

    ranks: Sequence[int] | None = None

    def __init__(
        self,
        channel: Channel,
        connection: Connection,
        store: Any,
        rank: int,
        world_size: int,
        timeout: float,
        listener: Listener,
        attempts: dict[tuple[str, int], int],
    ) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.settled = False
        self._channel, self._connection, self._listener = channel, connection, listener
        self._left = False
        self._locked = threading.Lock()  # of `_left` and `_uses`
        self._uses: dict[str, int] = {}
        # On the control thread:
        self._pending: list[Meeting] = []
        self._broken: BaseException | None = None
        self._tick_failed = False
        # On the store's thread; the next four while this rank has its place:
        self._rendezvous: Rendezvous
        self._space: Namespace
        self._news: Journal
        self._meetings: Meetings
        self._processes: Processes | None = None  # once it has had one
        self._queued: deque[tuple[Callable[[], None], Fail | None]] = deque()
        self._over: str | None = None  # why this rank's part has ended
        self._warned = False
        connection.submit(partial(self._begin, store, attempts))

    def tell(self, notice: Mapping[str, Any]) -> None:
        """Send `notice`, a JSON object of at most 64 KiB, to all other ranks of the group.

        It does not block, never raises and takes no lock, so that a finaliser may call it. Where
        the store is lost, or after a fork, it does nothing.
        """
        try:
            text = json.dumps(notice)
        except (TypeError, ValueError, RecursionError) as error:
            log.warning("gradwire: a notice cannot be sent: %s", error)
            return
        if len(text) > _MOST_NOTICE:
            log.warning("gradwire: a notice of %d bytes cannot be sent: %.80s", len(text), text)
        elif not self._channel.is_forked:
            self._submit(partial(self._publish, "told", notice))

    def counted(self, key: str) -> str:
        """A key for the next use of `key`: the same on all ranks that use it in one order."""
        with self._locked:
            count = self._uses[key] = self._uses.get(key, 0) + 1
        return key if count == 1 else f"{key} ({count})"

    def exchange(self, key: str, mine: bytes) -> Future[list[bytes]]:
        """Every rank's bytes, at most 4 MiB of each, in rank order; `key` names the exchange on all
        ranks, and is used once, by `agree` neither.

        Raises:
            ConfigError: `mine` is too large, or this process was forked.
            TransportError, in the future: ranks do not come within the group's timeout (the error
                names them), or the store is lost.
        """
        if len(mine) > _MOST_BYTES:
            raise ConfigError(f"an exchange of {len(mine)} bytes: at most {_MOST_BYTES} fit")
        return self._met(key, key, mine, None)

    def agree(self, key: str, what: str, description: Sequence[str]) -> Future[int]:
        """Verify that all ranks hold the same description; `what` is the subject, for errors, and
        `key` is used once. The future has the first 8 bytes of the description's digest.

        Raises:
            ConfigError: this process was forked; in the future: two ranks that differ have come. It
                has the first line that differs, and both ranks' values.
            TransportError: as of `exchange`.
        """
        return self._met(key, what, b"", described(self.world_size, what, description))

    def _met(self, key: str, what: str, mine: bytes, lines: Sequence[str] | None) -> Future[Any]:
        self._channel.check_process()
        meeting = Meeting(self._channel.post, self._shown, key, what, self.timeout, mine, lines)

        def begun() -> None:
            self._pending.append(meeting)
            if self._broken is not None:
                meeting.end(None, self._broken)

        def start() -> None:
            if not meeting.done():
                self._meetings.start(meeting)

        self._channel.post(begun)
        self._submit(start, meeting.fail)
        return meeting

    def first(self, key: str, value: bytes) -> bytes:
        """The value that a rank wrote first for `key`; one small store operation.

        It waits until this rank has its place in the group, except on the control thread.

        Raises:
            TransportError: the store is lost or does not answer, or there is no place yet.
            ConfigError: this process was forked.
        """
        self._channel.check_process()
        on_control = self._channel.is_current
        try:
            if on_control and not self.settled:
                raise TransportError(f"rank {self.rank} has no place in the group yet")
            return self._answer(
                lambda: self._space.below("firsts").first(key, value),
                _ANSWER_S if on_control else self.timeout,
            )
        except FutureTimeout:
            text = "the group's store does not answer, or rank 0 has not joined"
            raise self._shown(self._error(text)) from None
        except TransportError as error:
            raise self._shown(error) from None

    def ended(self) -> dict[int, list[str]]:
        """The peers of this machine whose processes are known to have ended, each with the
        exchanges and agreements of this rank that it has not reached.

        A few small store operations; if the store does not answer, the latter are not told.
        """
        processes = self._processes
        if processes is None:
            return {}

        def ended() -> dict[int, list[str]]:
            processes.read()
            return {rank: self._meetings.lacking(rank) for rank in processes.ended()}

        try:
            return self._answer(ended, _ANSWER_S)
        except (FutureTimeout, TransportError):
            return {rank: [] for rank in processes.ended()}

    def end(self, error: BaseException) -> None:
        """End all futures, present and later ones, with `error`: the group is broken."""

        def end() -> None:
            self._broken = error
            for meeting in self._pending:
                meeting.end(None, error)

        self._channel.post(end)

    def leave(self, notice: Mapping[str, Any]) -> None:
        """Leave the group; `notice` is the last that peers receive from this rank.

        Pending futures fail with TransportError. It takes at most one second: if the store does not
        answer by then, or this rank has no place in the group yet, peers do not receive the notice.
        A second call does nothing, nor does a call in a forked process.
        """
        if self._channel.is_forked:
            return
        with self._locked:
            if self._left:
                return
            self._left = True
        written = threading.Event()

        def leave() -> None:
            try:
                self._leave(notice)
            finally:
                written.set()

        if self._connection.submit(leave) and not self._connection.is_current:
            written.wait(_ANSWER_S)
        self.end(self._error("this rank has left the group"))
        self._channel.release(self, self._connection)

    # ---- on the control thread

    def waits(self, seconds: float) -> bool:
        """Whether an exchange or agreement has been open for so long."""
        return any(time.monotonic() - meeting.since > seconds for meeting in self._pending)

    def deadlines(self) -> list[float]:
        """When pending meetings have to end."""
        return [meeting.deadline for meeting in self._pending if not meeting.done()]

    def expire(self) -> None:
        """End meetings that have timed out, after a time in which missing ranks are found."""
        self._pending = [meeting for meeting in self._pending if not meeting.done()]
        for meeting in self._pending:
            if time.monotonic() < meeting.deadline:
                continue
            if not meeting.late:
                meeting.late = True
                meeting.deadline += _NAMING_S
                self._connection.submit(partial(self._expire, meeting))
            else:
                text = f"{meeting.what} did not complete within {meeting.timeout:g} s, and the"
                meeting.end(None, self._error(f"{text} group's store does not answer"))

    def tick(self) -> None:
        try:
            self._listener.tick()
            self._tick_failed = False
        except Exception:
            if not self._tick_failed:  # once, not five times a second
                log.exception("gradwire: a listener's tick failed")
            self._tick_failed = True

    def _deliver(self, sender: int, notice: Mapping[str, Any]) -> None:
        if self._left:
            return
        try:
            self._listener.heard(sender, notice)
        except Exception:
            log.exception("gradwire: a listener failed on a notice from rank %d", sender)

    # ---- on the store's thread

    def _begin(self, store: Any, attempts: dict[tuple[str, int], int]) -> None:
        if self._connection.gone is not None:
            self.lost(self._connection.gone)
            return
        self._connection.participants.append(self)
        self._rendezvous = Rendezvous(
            self._connection.root,
            self._connection.prefixed(store),
            self.rank,
            attempts,
            self.timeout,
            self._garbled,
        )
        self._connection.ring()
        self._connection.look()

    def _settle(self, space: Namespace) -> None:
        self._space = space
        self._news = Journal(space.below("news"), self.timeout)
        of = self.rank, self.world_size, space.below("meetings")
        self._meetings = Meetings(*of, self._publish, self._garbled)
        processes = space.below("processes")
        self._processes = Processes(processes, self.rank, self.timeout, self._garbled)
        self.settled = True
        while self._queued:
            command, _ = self._queued.popleft()
            command()

    def _when_settled(self, command: Callable[[], None], fail: Fail | None) -> None:
        if self._over is not None:
            if fail is not None:
                fail(self._error(self._over))
        elif not self.settled:
            self._queued.append((command, fail))
        else:
            command()

    def _publish(self, kind: str, what: Any) -> None:
        """Append to the news that all others read."""
        self._news.append(json.dumps({"from": self.rank, kind: what}).encode())
        self._connection.ring()

    def _expire(self, meeting: Meeting) -> None:
        if self.settled:
            self._meetings.expire(meeting)
        elif self._over is None:
            meeting.fail(did_not_come(self.rank, meeting, [0]))

    def _leave(self, notice: Mapping[str, Any]) -> None:
        if self in self._connection.participants:
            self._connection.participants.remove(self)
        if self.settled:
            self._publish("told", notice)
            self._connection.look()  # ranks may be threads of one process, on one connection
        self.lost("this rank has left the group")

    @property
    def must_wait(self) -> bool:
        """Whether something is pending, so that the store is polled more often."""
        if not self.settled:
            return True
        expects = self.rank == 0 and self._rendezvous.expects(self.world_size)
        return bool(self._meetings.pending()) or self._news.has_gaps or expects

    def look(self, rung: bool) -> None:
        """Read new entries, if there are any, or some were not complete."""
        try:
            gaps = self.settled and (
                self._news.has_gaps or self._meetings.must_poll or self._rendezvous.has_gaps
            )
            if rung or gaps:
                self._look()
        except ValueError as error:
            self._connection.participants.remove(self)
            reason = f"the group's store holds invalid data ({error})"
            if self.lost(reason):
                log.warning("gradwire: rank %d: %s", self.rank, reason)

    def _look(self) -> None:
        if not self.settled:
            space = self._rendezvous.find()
            if space is None:
                return
            self._settle(space)
        if self.rank == 0 and self._rendezvous.answer():
            self._connection.ring()
        for entry in self._news.new():
            self._read(entry)
        self._meetings.look()

    def _read(self, entry: bytes) -> None:
        try:
            news = json.loads(entry)
            sender = news["from"]
            if type(sender) is not int or not 0 <= sender < self.world_size:
                raise ValueError
            if sender == self.rank:
                return
            if isinstance(notice := news.get("told"), dict):
                self._channel.post(partial(self._deliver, sender, notice))
            elif isinstance(key := news.get("met"), str):
                self._meetings.complete(key)
            elif isinstance(key := news.get("differs"), str):
                self._meetings.differ(key, sender)
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

    def lost(self, reason: str) -> bool:
        """Fail what is pending, and drop the store; whether anything was pending."""
        self._over = self._over or reason
        fails = [fail for _, fail in self._queued if fail is not None]
        self._queued.clear()
        if self.settled:
            fails += [meeting.fail for meeting in self._meetings.pending()]
            self.settled = False
        for held in ("_rendezvous", "_space", "_news", "_meetings"):
            vars(self).pop(held, None)  # they hold the store
        if self._processes is not None:
            self._processes.drop()
        for fail in fails:
            fail(self._error(reason))
        return bool(fails)

    # ----

    def _error(self, reason: str) -> TransportError:
        return TransportError(f"rank {self.rank}: {reason}")

    def _shown(self, error: BaseException) -> BaseException:
        return in_global_ranks(error, self.ranks)

    def _answer(self, ask: Callable[[], T], timeout: float) -> T:
        """What `ask` returns on the store's thread."""
        answer: Future[T] = Future()

        def command() -> None:
            try:
                answer.set_result(ask())
            except Exception as error:
                answer.set_exception(self._error(str(error)))
                raise

        self._submit(command, answer.set_exception)
        return answer.result(timeout)

    def _submit(self, command: Callable[[], None], fail: Fail | None = None) -> None:
        submitted = not self._left and self._connection.submit(
            partial(self._when_settled, command, fail)
        )
        if not submitted and fail is not None:
            fail(TransportError(f"rank {self.rank} has left the group"))
