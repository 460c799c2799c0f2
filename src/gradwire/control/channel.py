"""The interface: the control channel of a process, and its memberships in groups.

Commands go to the thread of the group's store, and wait there until this rank has its place in an
incarnation of the group. Futures complete, and listeners are called, on the control thread.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from gradwire.control.connection import Connection, Posts, address_of, taken
from gradwire.control.description import described
from gradwire.control.participant import Command, Meeting, Participant
from gradwire.errors import ConfigError, TransportError, in_global_ranks

log = logging.getLogger("gradwire")

T = TypeVar("T")

_TICK_S = 0.2
_CLOSING_S = 3.0  # a thread in a distant store makes some round trips; one left there may abort
_ENDING_S = 0.1
_HEARD_S = 0.3  # time for peers to read the last notices: at exit the store may end
_MOST_BYTES = 4 << 20  # a TCPStore closes a connection that writes 8 MiB
_MOST_NOTICE = 1 << 16
_ANSWER_S = 1.0


class Channel:
    """The control channel of one process, with its thread.

    A process has one; tests make several. The thread starts with the first `join`, and ends with
    `close` or at the interpreter's exit. A forked child cannot use it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._posts: Posts = queue.SimpleQueue()
        self._members: list[Member] = []
        self._connections: list[Connection] = []
        self.attempts: dict[tuple[str, int], int] = {}  # (group, rank) -> how often it has joined
        self._thread = threading.Thread(target=self._run, name="gradwire-control", daemon=True)
        self._rung_at = 0.0  # time.monotonic() of the last notice for peers
        self._closing = False  # `join` raises
        self._stopping = False  # the thread must end
        self._ended = False  # the thread has ended: `post` runs actions on the caller's thread
        _channels.add(self)

    def join(
        self, store: dist.Store, rank: int, world_size: int, timeout: float, listener: Any
    ) -> Member:
        """Join the group of `store`; returns without waiting for peers.

        Args:
            store: the group's store; a later group may use the same one. Not kept alive.
            rank, world_size: in the group.
            timeout: seconds that peers have to reach what this rank waits for.
            listener: called on the control thread, which it must not block; what it raises is
                logged. `heard(sender, notice)`: a rank has sent a notice; a sender's arrive in
                order. `tick()`: about every 0.2 s until the rank leaves.

        Raises:
            ConfigError: an argument is wrong, the channel is closed, or this process was forked.
        """
        self.check_process()
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} of a group of {world_size}: give 0 to {world_size - 1}")
        if not timeout > 0:
            raise ConfigError(f"a timeout of {timeout} s: give a positive number of seconds")
        with self._lock:
            if self._closing:
                raise ConfigError("the control channel is closed: this process is ending")
            if self._thread.ident is None:
                self._thread.start()
            address = address_of(store)
            same = [c for c in self._connections if c.address == address]
            # Another store may have taken the address of one that is lost.
            connection = next((c for c in same if c.gone is None and not c.is_broken), None)
            if connection is None:
                connection = Connection(store, self._rung)
                connection.thread.start()
                self._connections.append(connection)
            member = Member(self, connection, store, rank, world_size, timeout, listener)
            self._members.append(member)
        self.post(lambda: None)  # wakes the thread, which now has a member to tick
        return member

    def close(self) -> None:
        """End the threads; pending futures fail. Earlier notices are still sent.

        It takes at most three seconds: a thread that is stuck in the store is left behind. It
        returns no earlier than 0.3 s after the last notice, so that peers can read it before a
        store in this process ends.
        """
        if self.is_forked:
            return
        with self._lock:
            self._closing = True
            connections, self._connections = self._connections, []
            members, self._members = self._members, []
        for connection in connections:
            connection.stop()
        deadline = time.monotonic() + _CLOSING_S
        for connection in connections:
            connection.thread.join(max(0.0, deadline - time.monotonic()))
        for member in members:
            member.end(TransportError("the control channel is closed: this process is ending"))
        time.sleep(max(0.0, self._rung_at + _HEARD_S - time.monotonic()))
        self._stopping = True
        self.post(lambda: None)
        if self._thread.is_alive() and not self.is_current:
            self._thread.join(_ENDING_S)

    # ---- for members

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self._pid

    @property
    def is_current(self) -> bool:
        """Whether the caller is the control thread."""
        return threading.current_thread() is self._thread

    def check_process(self) -> None:
        """Raise ConfigError in a process that was forked from the channel's."""
        if self.is_forked:
            raise ConfigError(
                "this process was forked from one that uses gradwire; a fork does not copy its "
                "threads and connections: start workers with the method 'spawn', or make the "
                "process group in the child"
            )

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` on the control thread; takes no lock."""
        self._posts.put(action)
        if self._ended:
            self._run_posts(0.0)

    def release(self, member: Member) -> None:
        """`member` has left."""
        connection = member.part.connection
        with self._lock:
            if member not in self._members:
                return
            self._members.remove(member)
            if any(other.part.connection is connection for other in self._members):
                return
            self._connections.remove(connection)
        connection.stop()
        if not self.is_current and not connection.is_current:
            connection.thread.join(_CLOSING_S)

    # ---- inside

    def _rung(self) -> None:
        self._rung_at = time.monotonic()

    def _run(self) -> None:
        tick_at = 0.0
        while not self._stopping:
            self._run_posts(max(0.0, tick_at - time.monotonic()) if self._members else None)
            if time.monotonic() >= tick_at:
                tick_at = time.monotonic() + _TICK_S
                self._tick()
        self._ended = True
        self._run_posts(0.0)

    # While the thread waits it holds no reference to a member, so that its group can end.

    def _tick(self) -> None:
        for member in list(self._members):
            member.tick()

    def _run_posts(self, pause: float | None) -> None:
        """Run what was posted; waits for the first."""
        for action in taken(self._posts, pause):
            try:
                action()
            except Exception:
                log.exception("gradwire: an action failed on the control thread")


class Member:
    """One rank's membership in one group; made by `Channel.join`; used from any thread.

    Attributes:
        ranks: of the group's members in the whole job, for errors; None: they are equal.
        part: this rank's in the group, on the store's thread.
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
        listener: Any,
    ) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.part = Participant(connection, channel.post, self._heard, rank, world_size, timeout)
        self._channel, self._listener = channel, listener
        self._left = False
        self._locked = threading.Lock()  # of `_left` and `_uses`
        self._uses: dict[str, int] = {}
        self._broken: BaseException | None = None
        self._tick_failed = False
        connection.submit(partial(self.part.begin, store, channel.attempts))

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
            self._submit(partial(self.part.publish, "told", notice))

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
        part = self.part
        meeting = Meeting(part, self._shown, key, what, self.timeout, mine, lines)
        if part.open.setdefault(key, meeting) is not meeting:
            text = f"rank {self.rank} uses the key '{key}' twice: use each once"
            meeting.end(None, ConfigError(text))
        elif self._broken is not None:
            meeting.end(None, self._broken)
        else:
            self._submit(meeting.start)
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
        if on_control and not self.part.settled:
            raise self._shown(TransportError(f"rank {self.rank} has no place in the group yet"))
        timeout = _ANSWER_S if on_control else self.timeout
        return self._answer(lambda: self.part.space.below("firsts").first(key, value), timeout)

    def ended(self) -> dict[int, list[str]]:
        """The peers of this machine whose processes are known to have ended, each with the
        exchanges and agreements of this rank that it has not reached.

        A few small store operations; if the store does not answer, the latter are not told.
        """
        if self.part.settled:
            with suppress(TransportError):
                return self._answer(self.part.ended, _ANSWER_S)
        return {rank: [] for rank in self.part.dead()}

    def end(self, error: BaseException) -> None:
        """End all futures, present and later ones, with `error`: the group is broken."""
        self._broken = error
        for meeting in list(self.part.open.values()):
            meeting.end(None, error)

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
                self.part.leave(notice)
            finally:
                written.set()

        if self.part.connection.submit(leave) and not self.part.connection.is_current:
            written.wait(_ANSWER_S)
        self.end(self.part.error("this rank has left the group"))
        self._channel.release(self)

    def waits(self, seconds: float) -> bool:
        """Whether an exchange or agreement has been open for so long."""
        since = time.monotonic() - seconds
        return any(meeting.since < since for meeting in list(self.part.open.values()))

    # ---- on the control thread

    def tick(self) -> None:
        """Called about every 0.2 s."""
        for meeting in list(self.part.open.values()):
            if time.monotonic() > meeting.deadline:
                meeting.overdue()
        try:
            self._listener.tick()
            self._tick_failed = False
        except Exception:
            if not self._tick_failed:  # once, not five times a second
                log.exception("gradwire: a listener's tick failed")
            self._tick_failed = True

    def _heard(self, sender: int, notice: Mapping[str, Any]) -> None:
        if self._left:
            return
        try:
            self._listener.heard(sender, notice)
        except Exception:
            log.exception("gradwire: a listener failed on a notice from rank %d", sender)

    # ----

    def _shown(self, error: BaseException) -> BaseException:
        return in_global_ranks(error, self.ranks)

    def _answer(self, ask: Callable[[], T], timeout: float) -> T:
        """What `ask` returns on the store's thread; a TransportError says why it does not."""
        answer: Future[T] = Future()

        def command(error: TransportError | None) -> bool:
            if error is not None:
                answer.set_exception(error)
                return True
            try:
                answer.set_result(ask())
            except Exception as failed:
                answer.set_exception(self.part.error(str(failed)))
                raise
            return False

        self._submit(command)
        try:
            return answer.result(timeout)
        except FutureTimeout:
            lost = self.part.error("the group's store does not answer, or rank 0 has not joined")
        except TransportError as error:
            lost = error
        raise self._shown(lost)

    def _submit(self, command: Command) -> None:
        run = partial(self.part.when_settled, command)
        if self._left or not self.part.connection.submit(run):
            command(TransportError(f"rank {self.rank} has left the group"))


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the threads while the interpreter still runs: a thread that returned from a store's C++
    code later would abort the process."""
    for channel in list(_channels):
        channel.close()
