"""The handshake by which ranks find out with which peers they can share memory, and map it.

A rank's segment and its process's store are anonymous files (memfd), whose descriptors are passed
through an abstract unix socket (SCM_RIGHTS). They have no entry in any file system, so killed ranks
leave nothing behind, and the size of /dev/shm, which is 64 MB in many containers, does not bound
them. Abstract sockets belong to a network namespace, so containers and the lab's nodes, which have
one each, do not connect to each other by mistake.

The steps, each an exchange over gloo of all ranks (2 and 3: of the ranks of one machine):

1. Each rank sends to all others its machine, a secret random token, and whether it can share
   memory.
2. In each pair on one machine, the higher rank connects to the lower one's socket, and sends its
   token and descriptors; then both tell each other whether that succeeded.
3. The lower rank answers with its own token and descriptors. Both map what they received, except a
   store that they have mapped for an earlier group, and tell each other whether that succeeded. The
   pair uses shared memory only if it did for both.

An abstract unix socket has no permissions: /proc/net/unix shows its name to every local user, and
every user may connect. So both ends ask the kernel which user is at the other end (SO_PEERCRED)
before they read or send a byte. Among the processes of this user, a rank is known by its token; the
name of its socket is a digest of the token, which does not tell it. A thread accepts until the
handshake ends. So the queue of connections does not stay full, and a process that connects and says
nothing delays no one.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from gradwire.transport import shm_library
from gradwire.transport.protocol import Transport
from gradwire.transport.shm import Shm

log = logging.getLogger("gradwire")

# Beyond all tags of collectives.
_HELLO_TAG, _CONNECTED_TAG, _MAPPED_TAG = ((1 << 30) - n for n in (4, 3, 2))
_ANSWER_S = 10.0  # within one machine, after the peer has announced the connection
_TOKEN = 16  # bytes
_HELLO = struct.Struct(f"<8s16s{_TOKEN}s?")
_NO_STORE = bytes(_TOKEN)
_CREDENTIALS = struct.Struct("iII")  # pid, user, group: the kernel's struct ucred


class _Hello(NamedTuple):
    """What a rank sends to all others.

    Attributes:
        version: of the segment layout, see `shm_library.version`.
        machine: digest of its machine's name.
        token: by which the ranks of its machine find and know it.
        able: whether it can share memory.
    """

    version: bytes
    machine: bytes
    token: bytes
    able: bool


class Said(NamedTuple):
    """What a rank tells a peer: one message of 2 _TOKEN bytes, and one or two descriptors.

    Attributes:
        token: its own.
        segment: the descriptor of its segment.
        lends: see `Shm.lends`.
    """

    token: bytes
    segment: int
    lends: tuple[bytes, int] | None

    def send(self, end: socket.socket) -> None:
        store, *fd = self.lends or (_NO_STORE,)
        socket.send_fds(end, [self.token + store], [self.segment, *fd])

    @classmethod
    def receive(cls, end: socket.socket, stack: ExitStack) -> Said:
        """`stack` closes the descriptors.

        Raises:
            OSError: the message has another size, or no descriptors, or there is none.
        """
        data, fds, _, _ = socket.recv_fds(end, 2 * _TOKEN + 1, 2, socket.MSG_CMSG_CLOEXEC)
        for fd in fds:
            stack.callback(os.close, fd)
        if len(data) != 2 * _TOKEN or not fds:
            raise OSError(f"it sent {len(data)} bytes and {len(fds)} descriptors")
        segment, *store = fds
        lends = store and data[_TOKEN:] != _NO_STORE
        return cls(data[:_TOKEN], segment, (data[_TOKEN:], store[0]) if lends else None)

    def rank(self, tokens: Mapping[int, bytes]) -> int | None:
        """The rank that says this; None: not one of these."""
        found = (p for p, token in tokens.items() if hmac.compare_digest(token, self.token))
        return next(found, None)


def machine_name() -> str:
    """A name that all ranks of one machine share: host name and boot id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    return f"{socket.gethostname()} {boot}"


def share(carrier: Transport, machine: str | None = None) -> tuple[Shm | None, frozenset[int]]:
    """Share memory with the ranks of this machine; all ranks of `carrier` call together.

    Args:
        carrier: carries the messages of the handshake.
        machine: the name of this machine; by default `machine_name`.

    Returns:
        This rank's end, and the peers that it reaches; None and an empty set if there are none. One
        warning names the peers on this machine that it does not reach, with the reason.

    Raises:
        TransportError: a peer did not answer.
    """
    rank = carrier.rank
    others = [p for p in range(carrier.world_size) if p != rank]
    if not others:
        return None, frozenset()
    with ExitStack() as stack:
        token = secrets.token_bytes(_TOKEN)
        reason = shm_library.unavailable()
        listener = None
        if reason is None:
            try:
                listener = stack.enter_context(closing(PeerListener(token)))
            except OSError as error:
                reason = f"no unix socket: {error}"
        digest = hashlib.blake2b((machine or machine_name()).encode(), digest_size=16).digest()
        hello = _Hello(shm_library.version(), digest, token, listener is not None)
        heard = _exchange(carrier, dict.fromkeys(others, _HELLO.pack(*hello)), _HELLO_TAG)
        hellos = {p: _Hello(*_HELLO.unpack(said)) for p, said in heard.items()}
        here = [p for p in others if hellos[p].machine == digest]
        able = [p for p in here if hellos[p].able and hellos[p].version == hello.version]
        shm, reached = None, frozenset[int]()
        if listener is not None and able:
            tokens = {p: hellos[p].token for p in able}
            shm, reached, reason = _pair_up(carrier, tokens, token, listener)
    lost = sorted(set(here) - reached)
    if lost:
        log.warning(
            "rank %d: gloo, not shared memory, carries messages to ranks %s of this machine: %s",
            rank, lost, reason or "see the warnings of these ranks",
        )  # fmt: skip
    return shm, reached


def _pair_up(
    carrier: Transport, tokens: Mapping[int, bytes], token: bytes, listener: PeerListener
) -> tuple[Shm | None, frozenset[int], str | None]:
    """Steps 2 and 3: this rank's end, the peers it reaches, and why it does not reach another."""
    rank = carrier.rank
    try:
        shm = Shm(rank, carrier.world_size, list(tokens), carrier.timeout)
    except OSError as error:
        for tag in (_CONNECTED_TAG, _MAPPED_TAG):
            _verdicts(carrier, dict.fromkeys(tokens, False), tag)
        return None, frozenset(), str(error)
    mine = Said(token, shm.fd, shm.lends)
    sockets: dict[int, socket.socket] = {}
    mapped: set[int] = set()
    reasons: list[str] = []
    with ExitStack() as stack:
        for peer in [p for p in tokens if p < rank]:
            with _noting(reasons, peer):
                end = stack.enter_context(connect(tokens[peer], _ANSWER_S))
                mine.send(end)
                sockets[peer] = end
        here = {p: p > rank or p in sockets for p in tokens}
        there = _verdicts(carrier, here, _CONNECTED_TAG)
        agreed = {p: known for p, known in tokens.items() if here[p] and there[p]}
        coming = {p: known for p, known in agreed.items() if p > rank}
        deadline = time.monotonic() + _ANSWER_S
        while coming:
            try:
                end, said = listener.next(deadline - time.monotonic())
            except OSError as error:
                reasons.append(str(error))
                break
            if (found := said.rank(coming)) is not None:
                del coming[found]
                with _noting(reasons, found), end:
                    mine.send(end)
                    shm.connect(found, said.segment, _alive(end), said.lends)
                    mapped.add(found)
        for peer in [p for p in sockets if p in agreed]:
            with _noting(reasons, peer), sockets[peer] as end:
                said = Said.receive(end, stack)
                if said.rank({peer: agreed[peer]}) is None:
                    raise PermissionError("another process listens on its socket")
                shm.connect(peer, said.segment, _alive(end), said.lends)
                mapped.add(peer)
        listener.close()  # ends the waits of peers that still expect an answer
    there = _verdicts(carrier, {p: p in mapped for p in tokens}, _MAPPED_TAG)
    reached = frozenset(p for p in mapped if there[p])
    shm.passed()
    if not reached:
        shm.close()
    return shm if reached else None, reached, next(iter(reasons), None)


@contextmanager
def _noting(reasons: list[str], peer: int) -> Iterator[None]:
    """A pair that fails leaves the others."""
    try:
        yield
    except OSError as error:
        reasons.append(f"rank {peer}: {error}")


def _verdicts(carrier: Transport, mine: Mapping[int, bool], tag: int) -> dict[int, bool]:
    heard = _exchange(carrier, {p: bytes([verdict]) for p, verdict in mine.items()}, tag)
    return {p: said == b"\1" for p, said in heard.items()}


def _exchange(carrier: Transport, mine: Mapping[int, bytes], tag: int) -> dict[int, bytes]:
    """Send each peer its bytes, and receive as many from each."""
    inbox = {p: torch.empty(len(said), dtype=torch.uint8) for p, said in mine.items()}
    receives = [carrier.irecv(data, p, tag) for p, data in inbox.items()]
    sends = [
        carrier.isend(torch.frombuffer(bytearray(said), dtype=torch.uint8), p, tag)
        for p, said in mine.items()
    ]
    for pending in (*receives, *sends):
        pending.wait()
    return {p: data.numpy().tobytes() for p, data in inbox.items()}


# ---- sockets between the ranks of one machine and one user


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
        _, user = _credentials(end)
        if user != os.geteuid():
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
        self._open = ExitStack()  # what is open besides; the thread's until it has ended
        self._thread = threading.Thread(target=self._serve, name="gradwire-listener", daemon=True)
        try:
            self._socket.bind(_address(token))
            self._socket.listen()
            self._socket.setblocking(False)
            self._thread.start()
        except (OSError, RuntimeError) as error:  # a limit of threads
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
        _, user = _credentials(end)
        if user != os.geteuid():
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


def _alive(end: socket.socket) -> int:
    """A descriptor that is readable once the process at the other end has ended.

    It is a pidfd where the kernel has them: a child that the peer forks, such as a data loader's
    worker, inherits the socket and would keep it open.
    """
    try:
        return os.pidfd_open(_credentials(end)[0])
    except OSError:  # an old kernel, a seccomp filter, or another PID namespace (pid 0)
        return os.dup(end.fileno())


def _credentials(end: socket.socket) -> tuple[int, int]:
    """The process, and its user, that connected or listens."""
    asked = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(asked)
    return pid, user


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # it keeps messages apart


def _address(token: bytes) -> str:
    return f"\0gradwire-{hashlib.blake2b(token, digest_size=_TOKEN).hexdigest()}"
