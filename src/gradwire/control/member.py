"""One rank's membership in one group: the interface of the control channel."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gradwire.control.connection import Connection
from gradwire.control.description import Description
from gradwire.control.participant import Fail, Participant
from gradwire.control.pending_result import PendingResult
from gradwire.errors import ConfigError, TransportError, in_global_ranks

if TYPE_CHECKING:
    from gradwire.control.channel import Channel

log = logging.getLogger("gradwire")

E = TypeVar("E", bound=BaseException)

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
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self._channel = channel
        self._connection = connection
        self._listener = listener
        self._left = False
        self._tick_failed = False
        self._open: list[PendingResult[Any]] = []  # on the control thread, as the next one
        self._broken: BaseException | None = None
        self._leaving = threading.Lock()
        self._counting = threading.Lock()
        self._uses: dict[str, int] = {}
        self._part = Participant(connection, store, rank, world_size, timeout, attempts, self._hear)
        connection.submit(self._part.begin)

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
            return
        if not self._channel.is_forked:
            self._submit(lambda: self._part.tell(text), None)

    def counted(self, key: str) -> str:
        """A key for the next use of `key`: the same on all ranks that use it in one order."""
        with self._counting:
            count = self._uses[key] = self._uses.get(key, 0) + 1
        return key if count == 1 else f"{key} ({count})"

    def exchange(self, key: str, mine: bytes) -> Future[list[bytes]]:
        """Every rank's bytes, in rank order.

        Args:
            key: names the exchange, the same on all ranks; used once.
            mine: at most 4 MiB.

        Returns:
            A future that completes on the control thread. It fails with TransportError if ranks do
            not come within the group's timeout (the error names them), or the store is lost.

        Raises:
            ConfigError: `mine` is too large, or this process was forked.
        """
        if len(mine) > _MOST_BYTES:
            raise ConfigError(f"an exchange of {len(mine)} bytes: at most {_MOST_BYTES} fit")
        pending: PendingResult[list[bytes]] = self._pending(key)
        self._submit(lambda: self._part.exchange(key, mine, pending), pending.fail)
        return pending.future

    def agree(self, key: str, what: str, description: Sequence[str]) -> Future[int]:
        """Verify that all ranks hold the same description.

        Args:
            key: names the agreement, the same on all ranks; used once.
            what: the subject, for errors.
            description: lines.

        Returns:
            A future of the first 8 bytes of the description's digest, which completes on the
            control thread. It fails with ConfigError as soon as two ranks that differ have come;
            the error has the first line that differs, and both ranks' values. It fails with
            TransportError as `exchange` does.

        Raises:
            ConfigError: this process was forked.
        """
        mine = Description.of(self.rank, self.world_size, what, description)
        pending: PendingResult[int] = self._pending(what)
        self._submit(lambda: self._part.agree(key, mine, pending), pending.fail)
        return pending.future

    def first(self, key: str, value: bytes) -> bytes:
        """The value that a rank wrote first for `key`; one small store operation.

        It waits until this rank has its place in the group, except on the control thread.

        Raises:
            TransportError: the store is lost or does not answer, or there is no place yet.
            ConfigError: this process was forked.
        """
        self._channel.check_process()
        on_control = self._channel.is_current
        reply: Future[bytes] = Future()
        try:
            if on_control and not self._part.settled:
                raise TransportError(f"rank {self.rank} has no place in the group yet")
            self._submit(lambda: self._part.first(key, value, reply), reply.set_exception)
            return reply.result(_ANSWER_S if on_control else self.timeout)
        except FutureTimeout:
            text = f"rank {self.rank}: the group's store does not answer, or rank 0 has not joined"
            raise self._shown(TransportError(text)) from None
        except TransportError as error:
            raise self._shown(error) from None

    def ended(self) -> dict[int, list[str]]:
        """The peers of this machine whose processes are known to have ended, each with the
        exchanges and agreements of this rank that it has not reached.

        A few small store operations; if the store does not answer, the latter are not told.
        """
        reply: Future[dict[int, list[str]]] = Future()
        if self._part.processes is None:
            return {}
        self._submit(lambda: self._part.ended(reply), reply.set_exception)
        try:
            return reply.result(_ANSWER_S)
        except (FutureTimeout, TransportError):
            return {rank: [] for rank in self._part.processes.ended()}

    def end(self, error: BaseException) -> None:
        """End all futures, present and later ones, with `error`: the group is broken."""

        def end() -> None:
            self._broken = error
            for pending in self._open:
                pending.fail_here(error)

        self._channel.post(end)

    def leave(self, notice: Mapping[str, Any]) -> None:
        """Leave the group; `notice` is the last that peers receive from this rank.

        Pending futures fail with TransportError. It takes at most one second: if the store does not
        answer by then, or this rank has no place in the group yet, peers do not receive the notice.
        A second call does nothing, nor does a call in a forked process.
        """
        if self._channel.is_forked:
            return
        with self._leaving:
            if self._left:
                return
            self._left = True
        written = threading.Event()

        def leave() -> None:
            try:
                self._part.leave(json.dumps(notice))
            finally:
                written.set()

        if self._connection.submit(leave) and not self._connection.is_current:
            written.wait(_ANSWER_S)
        self._channel.release(self, self._connection)

    # ---- called on the control thread

    def waits(self, seconds: float) -> bool:
        """Whether an exchange or agreement has been open for so long."""
        return any(time.monotonic() - pending.since > seconds for pending in self._open)

    def tick(self) -> None:
        if self._left:
            return
        self._open = [pending for pending in self._open if not pending.over]
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

    # ----

    def _hear(self, sender: int, notice: Mapping[str, Any]) -> None:
        self._channel.post(lambda: self._deliver(sender, notice))

    def _pending(self, what: str) -> PendingResult[Any]:
        self._channel.check_process()

        def late(pending: PendingResult[Any]) -> None:
            self._connection.submit(lambda: self._part.expire(pending))

        pending: PendingResult[Any] = PendingResult(
            self._channel.post, self.timeout, self.rank, what, late, _NAMING_S, self._shown
        )

        def opened() -> None:
            self._open.append(pending)
            if self._broken is not None:
                pending.fail_here(self._broken)

        self._channel.watch(pending)
        self._channel.post(opened)
        return pending

    def _shown(self, error: E) -> E:
        return in_global_ranks(error, self.ranks)

    def _submit(self, command: Callable[[], None], fail: Fail | None) -> None:
        submitted = not self._left and self._connection.submit(
            lambda: self._part.when_settled(command, fail)
        )
        if not submitted and fail is not None:
            fail(TransportError(f"rank {self.rank} has left the group"))
