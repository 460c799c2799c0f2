"""The control channel of a process: one control thread, and one thread per store server."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from gradwire.control.connection import Connection, address_of
from gradwire.control.member import Listener, Member
from gradwire.errors import ConfigError, TransportError

log = logging.getLogger("gradwire")

TICK_S = 0.2
_CLOSING_S = 0.35
_ENDING_S = 0.1
_HEARD_S = 0.3  # time for peers to read the last notices: at exit the store may end


class Channel:
    """The control channel of one process, with its thread.

    A process has one; tests make several. The thread starts with the first `join`, and ends with
    `close` or at the interpreter's exit. A forked child cannot use it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._posts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._members: list[Member] = []
        self._connections: list[Connection] = []
        self._attempts: dict[tuple[str, int], int] = {}
        self._thread: threading.Thread | None = None
        self._rung_at = 0.0  # time.monotonic() of the last notice for peers
        self._closing = False  # `join` raises
        self._stopping = False  # the thread must end
        self._ended = False  # the thread has ended: `post` runs actions on the caller's thread
        _channels.add(self)

    def join(
        self, store: dist.Store, rank: int, world_size: int, timeout: float, listener: Listener
    ) -> Member:
        """Join the group of `store`; returns without waiting for peers.

        Args:
            store: the group's store; a later group may use the same one. Not kept alive.
            rank, world_size: in the group.
            timeout: seconds that peers have to reach what this rank waits for.
            listener: receives the peers' notices.

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
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="gradwire-control", daemon=True
                )
                self._thread.start()
            connection = self._connection(store)
            connection.users += 1
            member = Member(
                self, connection, store, rank, world_size, timeout, listener, self._attempts
            )
            self._members.append(member)
        self.post(lambda: None)  # wakes the thread, which now has a member to tick
        return member

    def close(self) -> None:
        """End the threads; pending futures fail. Earlier notices are still sent.

        It takes at most half a second: a thread that is stuck in the store is left behind. It
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
            connection.join(max(0.0, deadline - time.monotonic()))
        for member in members:
            member.end(TransportError("the control channel is closed: this process is ending"))
        time.sleep(max(0.0, self._rung_at + _HEARD_S - time.monotonic()))
        self._stopping = True
        self.post(lambda: None)
        if self._thread is not None and not self.is_current:
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
            self._run_posts()

    def release(self, member: Member, connection: Connection) -> None:
        """`member` has left."""
        with self._lock:
            if member not in self._members:
                return
            self._members.remove(member)
            connection.users -= 1
            if connection.users > 0:
                return
            self._connections = [c for c in self._connections if c is not connection]
        connection.stop()
        if not self.is_current and not connection.is_current:
            connection.join(_CLOSING_S)

    # ---- inside

    def _connection(self, store: dist.Store) -> Connection:
        address = address_of(store)
        for connection in self._connections:
            if connection.address == address and connection.lives:
                return connection
        connection = Connection(store, self._rung)
        connection.start()
        self._connections.append(connection)
        return connection

    def _rung(self) -> None:
        self._rung_at = time.monotonic()

    def _run(self) -> None:
        tick_at = 0.0
        while not self._stopping:
            self._run_posts(self._pause(tick_at))
            ticks = time.monotonic() >= tick_at
            if ticks:
                tick_at = time.monotonic() + TICK_S
            self._serve_members(ticks)
        self._ended = True
        self._run_posts()

    # While the thread waits it holds no reference to a member, so that its group can end.

    def _pause(self, tick_at: float) -> float | None:
        members = list(self._members)
        wakes = [tick_at, *(at for member in members for at in member.deadlines())]
        return max(0.0, min(wakes) - time.monotonic()) if members else None

    def _serve_members(self, ticks: bool) -> None:
        for member in list(self._members):
            if ticks:
                member.tick()
            member.expire()

    def _run_posts(self, pause: float | None = 0.0) -> None:
        """Run what was posted; waits for the first."""
        with suppress(queue.Empty):
            while True:
                action = self._posts.get(timeout=pause)
                pause = 0.0
                try:
                    action()
                except Exception:
                    log.exception("gradwire: an action failed on the control thread")


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the threads while the interpreter still runs: a thread that returned from a store's C++
    code later would abort the process."""
    for channel in list(_channels):
        channel.close()
