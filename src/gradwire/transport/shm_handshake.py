"""The handshake by which ranks find out with which peers they can share memory, and map it.

A rank's segment and its process's store are anonymous files (memfd), whose descriptors are passed
through an abstract unix socket (SCM_RIGHTS). They have no entry in any file system, so killed ranks
leave nothing behind, and the size of /dev/shm, which is 64 MB in many containers, does not bound
them. Abstract sockets belong to a network namespace, so containers and the lab's nodes, which have
one each, do not connect to each other by mistake.

The steps, each an exchange over gloo of all ranks (2 and 3: of the ranks of one machine):

1. Each rank sends to all others its machine, a random token, and whether it can share memory.
2. In each pair on one machine, the higher rank connects to the socket named by the other's token
   and sends its descriptors; then both tell each other whether that succeeded.
3. The lower rank accepts, and answers with its own descriptors. Both map what they received, except
   a store that they have mapped for an earlier group, and tell each other whether that succeeded.
   The pair uses shared memory only if it did for both.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from gradwire.transport import shm_library
from gradwire.transport.protocol import Transport
from gradwire.transport.shm import Shm

log = logging.getLogger("gradwire")

# Beyond all tags of collectives.
_HELLO_TAG, _CONNECTED_TAG, _MAPPED_TAG = ((1 << 30) - n for n in (4, 3, 2))
_ANSWER_S = 10.0  # within one machine, after the peer has announced the connection
_HELLO = struct.Struct("<8s16s16s?")
_TOKEN = 16  # bytes
_NO_STORE = bytes(_TOKEN)


@dataclass(frozen=True)
class _Hello:
    """What a rank sends to all others.

    Attributes:
        version: of the segment layout, see `shm_library.version`.
        machine: digest of its machine's name.
        token: names its socket.
        able: whether it can share memory.
    """

    version: bytes
    machine: bytes
    token: bytes
    able: bool


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
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(_address(token))
                listener.listen(carrier.world_size)
            except OSError as error:
                listener, reason = None, f"no unix socket: {error}"
        digest = hashlib.blake2b((machine or machine_name()).encode(), digest_size=16).digest()
        hello = _Hello(shm_library.version(), digest, token, listener is not None)
        hellos = _hellos(carrier, others, hello)
        here = [p for p in others if hellos[p].machine == digest]
        able = [p for p in here if hellos[p].able and hellos[p].version == hello.version]
        shm, reached = None, frozenset[int]()
        if listener is not None and able:
            shm, reached, reason = _pair_up(carrier, able, hellos, token, listener)
    lost = sorted(set(here) - reached)
    if lost:
        log.warning(
            "rank %d: gloo, not shared memory, carries messages to ranks %s of this machine: %s",
            rank, lost, reason or "see the warnings of these ranks",
        )  # fmt: skip
    return shm, reached


def _pair_up(
    carrier: Transport,
    peers: list[int],
    hellos: Mapping[int, _Hello],
    token: bytes,
    listener: socket.socket,
) -> tuple[Shm | None, frozenset[int], str | None]:
    """Steps 2 and 3: this rank's end, the peers it reaches, and why it does not reach another."""
    rank, shm, reason = carrier.rank, None, None
    sockets: dict[int, socket.socket] = {}
    mapped: set[int] = set()
    with ExitStack() as stack:
        try:
            shm = Shm(rank, carrier.world_size, peers, carrier.timeout)
        except OSError as error:
            reason = str(error)
        for peer in [p for p in peers if p < rank]:
            if shm is None:
                break
            end = stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                end.settimeout(_ANSWER_S)
                end.connect(_address(hellos[peer].token))
                _hand_over(end, shm, token)
                sockets[peer] = end
            except OSError as error:
                reason = f"rank {peer}: {error}"
        mine = {p: shm is not None and (p > rank or p in sockets) for p in peers}
        theirs = _verdicts(carrier, mine, _CONNECTED_TAG)
        if shm is not None:
            coming = {hellos[p].token: p for p in peers if p > rank and theirs[p]}
            answers = {p: end for p, end in sockets.items() if theirs[p]}
            try:
                _accept(listener, shm, coming, mapped)
                for peer, end in answers.items():
                    _take(end, shm, peer, mapped)
            except OSError as error:
                reason = f"{type(error).__name__}: {error}"
        listener.close()  # ends the waits of peers that still expect an answer
    theirs = _verdicts(carrier, {p: p in mapped for p in peers}, _MAPPED_TAG)
    reached = frozenset(p for p in mapped if theirs[p])
    if shm is not None:
        shm.passed()
        if not reached:
            shm.close()
            shm = None
    return shm, reached, reason


def _accept(listener: socket.socket, shm: Shm, coming: dict[bytes, int], mapped: set[int]) -> None:
    """Answer the peers `coming`, by their tokens; close connections of strangers."""
    listener.settimeout(_ANSWER_S)
    while coming:
        end, _ = listener.accept()
        with end:
            end.settimeout(_ANSWER_S)
            with _received(end) as (token, store, fds):
                peer = coming.pop(token, None)
                if peer is not None and fds:
                    _hand_over(end, shm, token)
                    _connect(end, shm, peer, store, fds)
                    mapped.add(peer)


def _take(end: socket.socket, shm: Shm, peer: int, mapped: set[int]) -> None:
    """Receive the peer's answer, and map its memory."""
    with _received(end) as (_, store, fds):
        if fds:
            _connect(end, shm, peer, store, fds)
            mapped.add(peer)


def _hand_over(end: socket.socket, shm: Shm, token: bytes) -> None:
    """Send the tokens of this rank and of its store, if any, with both descriptors."""
    store, fd = shm.lends or (_NO_STORE, None)
    socket.send_fds(end, [token + store], [shm.fd] if fd is None else [shm.fd, fd])


@contextmanager
def _received(end: socket.socket) -> Iterator[tuple[bytes, bytes, list[int]]]:
    """Receive what `_hand_over` sends; the descriptors are closed on exit."""
    flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL
    said, fds, _, _ = socket.recv_fds(end, 2 * _TOKEN, 2, flags)
    try:
        yield said[:_TOKEN], said[_TOKEN:], fds
    finally:
        for fd in fds:
            os.close(fd)


def _connect(end: socket.socket, shm: Shm, peer: int, store: bytes, fds: list[int]) -> None:
    lends = (store, fds[1]) if len(fds) == 2 and store != _NO_STORE else None
    shm.connect(peer, fds[0], _alive(end), lends)


def _alive(end: socket.socket) -> int:
    """A descriptor that is readable once the process at the other end has ended.

    It is a pidfd where the kernel has them: a child that the peer forks, such as a data loader's
    worker, inherits the socket and would keep it open.
    """
    pid = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    try:
        return os.pidfd_open(pid)
    except OSError:  # an old kernel, a seccomp filter, or another PID namespace (pid 0)
        return os.dup(end.fileno())


def _address(token: bytes) -> str:
    return f"\0gradwire-{token.hex()}"


def _hellos(carrier: Transport, others: list[int], hello: _Hello) -> dict[int, _Hello]:
    mine = _HELLO.pack(hello.version, hello.machine, hello.token, hello.able)
    heard = _exchange(carrier, dict.fromkeys(others, mine), _HELLO_TAG)
    return {p: _Hello(*_HELLO.unpack(said)) for p, said in heard.items()}


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
