"""The thread that makes all operations on one store server, for all groups that use the server.

A rank that has written something for others rings the server's doorbell, a counter. The thread
polls the doorbell about five times per second, with one small operation, and reads its groups' keys
only when it has changed; while a future is pending it polls more often. It does not wait inside the
store: such a wait cannot be interrupted, and torch writes to standard error when one times out.

For every operation on a server that has ended, torch's client writes a warning with a stack trace
to standard error; connecting to one blocks for minutes. At the end of a training script the server
often ends first. So a plain socket without traffic, which breaks silently, shows whether the server
still runs, and no operation is started once it is broken.
"""

from __future__ import annotations

import logging
import queue
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch.distributed as dist

from gradwire.control.namespace import Namespace

log = logging.getLogger("gradwire")

_ROOT = "gradwire/control/"
_SERVER_KEY = "gradwire/server"
_CONNECT_S = 5.0
_IDLE_S = 0.2
_BUSY_S = 0.001
_SLOWER = 1.5
# Reads per second of all ranks together; a server answers 50 000 to 100 000 per second and core.
_WAITING_PER_S = 20_000
_RESTING_PER_S = 2_500

Address = tuple[Any, int | None]  # of a server: (host, port) of a TCPStore, else (key, None)


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
        store: a torch.distributed Store, with any prefixes. `connect` drops the reference: the
            store may be the server itself.
        rung: called after the doorbell was rung.

    Attributes:
        address: of the server.
        users: how many members share this; guarded by the lock of their Channel.
        root: gradwire's keys in the store; on the thread only, while the store is reachable.
        gone: why the store is lost, or None.
        participants: the members whose groups use it; on the thread only.
    """

    def __init__(self, store: Any, rung: Callable[[], None]) -> None:
        self.address = address_of(store)
        self.users = 0
        self.root: Namespace
        self.gone: str | None = None
        self.participants: list[Subscriber] = []
        self._store = store
        self._base: Any = None  # of a store other than TCPStore, so that its id stays its address
        self._client: Any = None
        self._prefixed: Any = None
        self._server = b""  # the server's random name
        self._watch: socket.socket | None = None
        self._rung = rung
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
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
        self._commands.put(lambda: None)  # wakes it

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
        return self.gone is None and not self.is_broken

    @property
    def is_broken(self) -> bool:
        """Whether the server has closed the socket; thread-safe, one system call."""
        watch = self._watch
        if watch is None:
            return False
        try:
            watch.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            pass
        return True

    # ---- on the thread

    def prefixed(self, store: Any) -> Any:
        """A new connection to a group's store, to be used once.

        For the first group it is this connection itself, with the group's prefixes.
        """
        ours, self._prefixed = self._prefixed, None
        return _own(store) if ours is None else ours

    def ring(self) -> None:
        """Make all processes that share the server read new entries."""
        self._must_ring = True

    def look(self) -> None:
        """Read new entries even if the doorbell has not changed."""
        self._must_look = True

    def turn(self) -> bool:
        """Wait for a command or the next poll, and handle it; False: the thread must end."""
        stopping = self._stopping  # then all that was submitted before is found
        commands = self._next(0.0 if stopping else None if self.gone else self._pause)
        for command in commands:
            self._guarded(command)
        if stopping:
            self._end()
            return False
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

    def _next(self, seconds: float | None) -> list[Callable[[], None]]:
        """The submitted commands; waits for one, at most so long."""
        commands = []
        with suppress(queue.Empty):
            commands.append(self._commands.get(timeout=seconds))
            while True:
                commands.append(self._commands.get_nowait())
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
                self.check()
        except (RuntimeError, OSError) as error:
            self._lose(str(error))
        try:
            return step()
        except (RuntimeError, OSError) as error:
            self._lose(str(error))
        except Exception as error:
            log.exception("gradwire: the control channel failed")
            self._lose(repr(error))

    def _connect(self) -> None:
        self._watch = _watched(self.address)
        store, self._store = self._store, None
        base = _without_prefixes(store)
        self._base = None if isinstance(base, dist.TCPStore) else base
        self._prefixed = _own(store)
        self._client = _without_prefixes(self._prefixed)
        self._server = _server(self._client)
        self.root = Namespace(self._client, _ROOT)

    def check(self) -> None:
        """Raise OSError or RuntimeError if the server has ended; one system call.

        A server may close an idle socket and still run; and where one has ended, another may have
        taken its address. `is_broken` stays true until this is known, so that no new group joins
        through a server that has ended.
        """
        if self._watch is None or not self.is_broken:
            return
        watch = _watched(self.address)
        assert watch is not None
        try:
            if _server(_own(self._client)) != self._server:
                raise ConnectionError("another store has taken its address")
        except (RuntimeError, OSError):
            watch.close()
            raise
        self._watch.close()
        self._watch = watch

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
        host, port = self.address
        which = "the group's store" if port is None else f"the store at {host}:{port}"
        reason = (
            f"{which} is lost ({lines[0]}): the process that hosts it has ended or cannot "
            "be reached"
        )
        if self._close(reason):
            log.warning("gradwire: %s", reason)

    def _end(self) -> None:
        self._guarded(self._ring)
        self._close("the control channel is closed: this process is ending")
        for command in self._next(0.0):  # which were submitted meanwhile, and fail
            self._guarded(command)

    def _close(self, reason: str) -> bool:
        """Drop the store, and fail what is pending; whether anything was."""
        self.gone = self.gone or reason
        self._store = self._base = self._client = self._prefixed = None
        vars(self).pop("root", None)
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        participants, self.participants = self.participants, []
        waited = [participant.lost(self.gone) for participant in participants]
        return any(waited)


def address_of(store: Any) -> Address:
    """Equal for stores on the same server: (host, port) of a TCPStore, else another key."""
    base = _without_prefixes(store)
    if isinstance(base, dist.TCPStore):
        return base.host, base.port
    with suppress(AttributeError):
        return base.path, None
    return id(base), None


def _watched(address: Address) -> socket.socket | None:
    """A socket that breaks as the server ends; None for a store that is no TCPStore."""
    host, port = address
    if port is None:
        return None
    watch = socket.create_connection((host, port), timeout=_CONNECT_S)
    watch.setblocking(False)
    return watch


def _without_prefixes(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _own(store: Any) -> Any:
    """A new connection to a store; the store itself, if its kind cannot be cloned."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        if isinstance(_without_prefixes(store), dist.TCPStore):
            raise
        return store


def _server(store: Any) -> bytes:
    """The random name of a store's server, which its first client writes."""
    name: bytes = store.compare_set(_SERVER_KEY, "", secrets.token_hex(8))
    return name
