"""The thread that makes all operations on one store server, for all groups that use the server.

A rank that has written something for others rings the server's doorbell, a counter. The thread
polls the doorbell about five times per second, with one small operation, and reads its groups' keys
only when it has changed; while a future is pending it polls more often. It does not wait inside the
store: such a wait cannot be interrupted, and torch writes to standard error when one times out.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from gradwire.control.host import Gone, Host, own, without_prefixes
from gradwire.control.namespace import Namespace

log = logging.getLogger("gradwire")

_ROOT = "gradwire/control/"
_IDLE_S = 0.2
_BUSY_S = 0.001
_SLOWER = 1.5
# Reads per second of all ranks together; a server answers 50 000 to 100 000 per second and core.
_WAITING_PER_S = 20_000
_RESTING_PER_S = 2_500


class Subscriber(Protocol):
    """One rank's part in one group, as the thread sees it."""

    world_size: int

    @property
    def must_wait(self) -> bool:
        """Whether a future is pending, so that the thread polls more often."""

    def look(self, rung: bool) -> None:
        """Called at every poll; `rung`: there are new entries."""

    def lost(self, reason: str) -> bool:
        """The store is gone: fail what is pending. Returns whether anything was."""


class Connection:
    """A connection to a store server, and its thread.

    Args:
        host: the server.
        rung: called after the doorbell was rung.

    Attributes:
        users: how many members share this; guarded by the lock of their Channel.
        root: gradwire's keys in the store; on the thread only, while the store is reachable.
        gone: why the store is lost, or None.
        participants: the members whose groups use it; on the thread only.
    """

    def __init__(self, host: Host, rung: Callable[[], None]) -> None:
        self.users = 0
        self.root: Namespace
        self.gone: str | None = None
        self.participants: list[Subscriber] = []
        self._host = host
        self._rung = rung
        self._prefixed: Any = None
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._bell = 0
        self._must_ring = False
        self._must_look = False
        self._stopping = False
        self._pause = 0.0
        self._thread = threading.Thread(target=self._run, name="gradwire-store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, command: Callable[[], None]) -> bool:
        """Queue `command` for the thread; False once this is stopped.

        It takes no lock, so that a finaliser may call it.
        """
        if self._stopping:
            return False
        self._commands.put(command)
        return True

    def stop(self) -> None:
        """End the thread after the submitted commands."""
        self._stopping = True
        self._commands.put(None)

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended, for at most `timeout` seconds."""
        self._thread.join(timeout)

    @property
    def is_current(self) -> bool:
        """Whether the caller is the thread."""
        return threading.current_thread() is self._thread

    @property
    def lives(self) -> bool:
        """Whether this store is reachable: another may have taken its address."""
        return self.gone is None and not self._host.is_broken

    # ---- on the thread

    def prefixed(self, store: Any) -> Any:
        """A new connection to a group's store, to be used once.

        For the first group it is this connection itself, with the group's prefixes.
        """
        ours, self._prefixed = self._prefixed, None
        return own(store) if ours is None else ours

    def ring(self) -> None:
        """Make all processes that share the server read new entries."""
        self._must_ring = True

    def look(self) -> None:
        """Read new entries even if the doorbell has not changed."""
        self._must_look = True

    def turn(self) -> bool:
        """Wait for a command or the next poll, and handle it; False: the thread must end."""
        commands = self._next()
        for command in commands:
            if command is None:
                self._end()
                return False
            self._guarded(command)
        found = self._guarded(self._poll)
        self._pause = self._next_pause(_BUSY_S if commands or found else self._pause * _SLOWER)
        return True

    def connect(self) -> None:
        """Open the connection; before the first turn."""
        self._guarded(self._connect)

    def _run(self) -> None:
        self.connect()
        while self.turn():
            pass

    def _next(self) -> list[Callable[[], None] | None]:
        """The submitted commands; waits for one, or for the end of the pause."""
        commands: list[Callable[[], None] | None] = []
        try:
            commands.append(self._commands.get(timeout=self._pause if self.gone is None else None))
            while commands[-1] is not None:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            pass
        return commands

    def _next_pause(self, wanted: float) -> float:
        size = max((p.world_size for p in self.participants), default=1)
        rest = max(_IDLE_S, size / _RESTING_PER_S)
        if not any(p.must_wait for p in self.participants):
            return rest
        return min(rest, max(wanted, size / _WAITING_PER_S))

    def _guarded(self, step: Callable[[], Any]) -> Any:
        """What `step` returns; if the store fails, everything pending fails with that error.

        The step also runs after the store is lost: a command may add a future, which then fails.
        """
        try:
            if self.gone is None:
                self._host.check()
        except Gone as error:
            self._lose(str(error))
        try:
            return step()
        except (Gone, RuntimeError, OSError) as error:
            self._lose(str(error))
        except Exception as error:
            log.exception("gradwire: the control channel failed")
            self._lose(repr(error))

    def _connect(self) -> None:
        if self.gone is not None:
            return
        self._prefixed = self._host.connect()
        self.root = Namespace(without_prefixes(self._prefixed), _ROOT)

    def _poll(self) -> bool:
        """Let participants look if the doorbell has changed; whether it has."""
        if self.gone is not None:
            return False
        self._ring()
        bell = self.root.counted("bell")
        rung = bell != self._bell or self._must_look
        self._bell = bell
        self._must_look = False
        for participant in list(self.participants):
            participant.look(rung)
        self._ring()
        return rung

    def _ring(self) -> None:
        if self._must_ring and self.gone is None:
            self._must_ring = False
            bell = self.root.add("bell")
            self._rung()
            if bell == self._bell + 1 and len(self.participants) < 2:
                self._bell = bell  # only this participant has rung: it need not look

    def _lose(self, reason: str) -> None:
        if self.gone is not None:
            return
        lines = reason.splitlines() or ["no reason given"]
        reason = (
            f"{self._host} is lost ({lines[0]}): the process that hosts it has ended or cannot be "
            "reached"
        )
        if self._close(reason):
            log.warning("gradwire: %s", reason)

    def _end(self) -> None:
        self._guarded(self._ring)
        self._close("the control channel is closed: this process is ending")
        while True:  # commands that were submitted meanwhile fail
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                self._guarded(command)

    def _close(self, reason: str) -> bool:
        """Drop the store, and fail what is pending; whether anything was."""
        self.gone = self.gone or reason
        self._host.close()
        self._prefixed = None
        if hasattr(self, "root"):
            del self.root
        participants, self.participants = self.participants, []
        waited = [participant.lost(self.gone) for participant in participants]
        return any(waited)
