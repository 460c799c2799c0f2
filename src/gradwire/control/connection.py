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
from typing import Any

import torch.distributed as dist

from gradwire.control.keys import Namespace

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

Posts = queue.SimpleQueue[Callable[[], object]]
Address = tuple[Any, int | None]  # of a server: (host, port) of a TCPStore, else (key, None)


class Connection:
    """A connection to a store server, and its thread.

    Args:
        store: a torch.distributed Store, with any prefixes. `connect` drops the reference: the
            store may be the server itself.
        rung: called after the doorbell was rung.

    Attributes:
        address: of the server.
        root: gradwire's keys in the store; on the thread only, while the store is reachable.
        gone: why the store is lost, or None.
        participants: of the groups that use it, on the thread only: what is called at every poll,
            with whether there are new entries, and returns whether a future is pending, so that
            the thread polls more often; and what is called when the store is lost, with the
            reason, and returns whether anything was pending, which it has to fail.
        world_size: of the largest group so far.
        thread: to be started; `connect`, and then `turn` until it returns False.
    """

    def __init__(self, store: Any, rung: Callable[[], None]) -> None:
        self.address = address_of(store)
        self.root: Namespace
        self.gone: str | None = None
        self.participants: dict[Callable[[bool], bool], Callable[[str], bool]] = {}
        self.world_size = 1
        self._store = store
        self._client: Any = None
        self._prefixed: Any = None
        self._server = b""  # the server's random name
        self._watch: socket.socket | None = None
        self._rung = rung
        self._commands: Posts = queue.SimpleQueue()
        self._bell = 0
        self._must_ring = False
        self._must_look = False
        self._must_wait = False
        self._stopping = False
        self._pause = 0.0
        self.thread = threading.Thread(target=self._run, name="gradwire-store", daemon=True)

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

    @property
    def is_current(self) -> bool:
        """Whether the caller is the thread."""
        return threading.current_thread() is self.thread

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

    def ring(self, here: bool = False) -> None:
        """Make all processes that share the server read new entries; with `here` this one, too,
        even if no other participant has rung."""
        self._must_ring = True
        self._must_look = self._must_look or here

    def turn(self) -> bool:
        """Wait for a command or the next poll, and handle it; False: the thread must end."""
        stopping = self._stopping  # then all that was submitted before is found
        commands = taken(self._commands, 0.0 if stopping else None if self.gone else self._pause)
        for command in commands:
            self._guarded(command)
        if stopping:
            self._end()
            return False
        found = self._guarded(self._poll)
        self._pause = self._next_pause(_BUSY_S if commands or found else self._pause * _SLOWER)
        return True

    def _run(self) -> None:
        self._guarded(self.connect)
        while self.turn():
            pass

    def _next_pause(self, wanted: float) -> float:
        rest = max(_IDLE_S, self.world_size / _RESTING_PER_S)
        return min(rest, max(wanted, self.world_size / _WAITING_PER_S)) if self._must_wait else rest

    def _guarded(self, step: Callable[[], Any]) -> Any:
        """What `step` returns; if the store fails, everything pending fails with that error.

        The step also runs after the store is lost: a command may add a future, which then fails.
        """
        found = None
        for one in (self.check, step):
            try:
                found = one()
            except (RuntimeError, OSError) as error:
                self._lose(str(error))
            except Exception as error:
                log.exception("gradwire: the control channel failed")
                self._lose(repr(error))
        return found

    def connect(self) -> None:
        """Open the connection; before the first turn."""
        self._watch = _watched(self.address)
        store, self._store = self._store, None
        if self.address[1] is None:
            self._store = _without_prefixes(store)  # kept, so that its id stays its address
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
        waits = [look(rung) for look in list(self.participants)]
        self._must_wait = any(waits)
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
        for command in taken(self._commands, 0.0):  # which were submitted meanwhile, and fail
            self._guarded(command)

    def _close(self, reason: str) -> bool:
        """Drop the store, and fail what is pending; whether anything was."""
        self.gone = self.gone or reason
        self._store = self._client = self._prefixed = None
        vars(self).pop("root", None)
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        participants, self.participants = self.participants, {}
        waited = [lost(self.gone) for lost in participants.values()]
        return any(waited)


def taken(posts: Posts, seconds: float | None) -> list[Callable[[], object]]:
    """What was posted; waits for the first, at most so long."""
    found = []
    with suppress(queue.Empty):
        found.append(posts.get(timeout=seconds))
        while True:
            found.append(posts.get_nowait())
    return found


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
