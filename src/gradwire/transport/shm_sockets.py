"""Sockets between the ranks of one machine and one user, which pass descriptors (SCM_RIGHTS).

An abstract unix socket has no permissions: /proc/net/unix shows its name to every local user, and
every user may connect. So both ends ask the kernel which user is at the other end (SO_PEERCRED)
before they read or send a byte. Among the processes of this user, a rank is known by its token,
which it has sent to the others over the group's own messages; the name of its socket is a digest
of the token, which does not tell it.

A thread of the listener accepts until it is closed. So the queue of connections does not stay full,
and a process that connects and says nothing delays no one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import selectors
import socket
import struct
import threading
from contextlib import ExitStack
from dataclasses import dataclass

log = logging.getLogger("gradwire")

TOKEN = 16  # bytes
_CREDENTIALS = struct.Struct("iII")  # pid, user, group: the kernel's struct ucred


@dataclass(frozen=True)
class Said:
    """What a rank tells a peer: one message of 2 TOKEN bytes.

    Attributes:
        token, store: its own, and its store's.
        fds: its descriptors, one or two.
    """

    token: bytes
    store: bytes
    fds: tuple[int, ...]

    def send(self, end: socket.socket) -> None:
        socket.send_fds(end, [self.token + self.store], self.fds)

    @classmethod
    def receive(cls, end: socket.socket, stack: ExitStack) -> Said:
        """`stack` closes the descriptors.

        Raises:
            OSError: the message has another size, or no descriptors, or there is none.
        """
        data, fds, _, _ = socket.recv_fds(end, 2 * TOKEN + 1, 2, socket.MSG_CMSG_CLOEXEC)
        for fd in fds:
            stack.callback(os.close, fd)
        if len(data) != 2 * TOKEN or not fds:
            raise OSError(f"it sent {len(data)} bytes and {len(fds)} descriptors")
        return cls(data[:TOKEN], data[TOKEN:], tuple(fds))


def connect(token: bytes, seconds: float) -> socket.socket:
    """A connection to the listener of the rank with this token, whose waits last `seconds`.

    Raises:
        OSError: nothing listens there, a process of another user does, or its queue stays full.
    """
    end = _socket()
    try:
        # In connect the kernel waits for room in the queue only if the socket blocks.
        whole = int(seconds)
        limit = struct.pack("@ll", whole, int(1e6 * (seconds - whole)))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.connect(_address(token))
        end.settimeout(seconds)
        if (user := _other_user(end)) is not None:
            raise PermissionError(f"a process of user {user}, not {os.geteuid()}, listens there")
    except BaseException:
        end.close()
        raise
    return end


class PeerListener:
    """Accepts processes of this user, until `close`.

    Args:
        token: of this rank.

    Raises:
        OSError: there is no socket for it.
    """

    def __init__(self, token: bytes) -> None:
        self._arrived: queue.SimpleQueue[tuple[socket.socket, Said] | OSError]
        self._arrived = queue.SimpleQueue()
        self._strangers: set[int] = set()  # users whose connections were closed
        self._closed = False
        self._socket = _socket()
        try:
            self._socket.bind(_address(token))
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._open = ExitStack()  # what is open besides; the thread's until it has ended
        self._thread = threading.Thread(target=self._serve, name="gradwire-listener", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # a limit of threads
            self._socket.close()
            raise OSError(str(error)) from None

    def next(self, seconds: float) -> tuple[socket.socket, Said]:
        """The next connection, and what came first on it. Both stay open until `close`.

        Raises:
            OSError: there is none within `seconds`, or this process is out of descriptors.
        """
        try:
            arrived = self._arrived.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            raise TimeoutError("a peer that has connected was not heard") from None
        if isinstance(arrived, OSError):
            raise arrived
        return arrived

    def close(self) -> None:
        """End the thread, and close all connections."""
        if self._closed:
            return
        self._closed = True
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread; no process can connect now
        self._thread.join()
        self._socket.close()
        self._open.close()
        if self._strangers:
            log.warning(
                "processes of users %s, not %d, connected to the socket by which ranks share "
                "memory; their connections were closed", sorted(self._strangers), os.geteuid(),
            )  # fmt: skip

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while not self._closed:
                for key, _ in selector.select():
                    end = key.fileobj
                    assert isinstance(end, socket.socket)
                    if end is not self._socket:
                        selector.unregister(end)
                        self._read(end)
                        continue
                    try:
                        come = self._accept()
                    except OSError as error:  # no descriptor is left
                        self._arrived.put(error)
                        return
                    if come is not None:
                        selector.register(come, selectors.EVENT_READ)

    def _accept(self) -> socket.socket | None:
        """The next connection; None if it is gone, or comes from another user."""
        try:
            end, _ = self._socket.accept()
        except BlockingIOError:
            return None
        if (user := _other_user(end)) is not None:
            self._strangers.add(user)
            end.close()
            return None
        end.setblocking(False)
        return self._open.enter_context(end)

    def _read(self, end: socket.socket) -> None:
        try:
            self._arrived.put((end, Said.receive(end, self._open)))
        except OSError:  # no rank of this version
            end.close()


def alive(end: socket.socket) -> int:
    """A descriptor that is readable once the process at the other end has ended.

    It is a pidfd where the kernel has them: a child that the peer forks, such as a data loader's
    worker, inherits the socket and would keep it open.
    """
    try:
        return os.pidfd_open(_credentials(end)[0])
    except OSError:  # an old kernel, a seccomp filter, or another PID namespace (pid 0)
        return os.dup(end.fileno())


def _other_user(end: socket.socket) -> int | None:
    """The user at the other end; None: this process's own."""
    user = _credentials(end)[1]
    return None if user == os.geteuid() else user


def _credentials(end: socket.socket) -> tuple[int, int]:
    """The process, and its user, that connected or listens."""
    asked = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(asked)
    return pid, user


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # it keeps messages apart


def _address(token: bytes) -> str:
    return f"\0gradwire-{hashlib.blake2b(token, digest_size=TOKEN).hexdigest()}"
