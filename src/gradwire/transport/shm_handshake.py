"""The handshake by which ranks find out with which peers they can share memory, and map it.

A rank's segment and its process's store are anonymous files (memfd), whose descriptors are passed
through an abstract unix socket (`shm_sockets`). They have no entry in any file system, so killed
ranks leave nothing behind, and the size of /dev/shm, which is 64 MB in many containers, does not
bound them. Abstract sockets belong to a network namespace, so containers and the lab's nodes, which
have one each, do not connect to each other by mistake.

The steps, each an exchange over gloo of all ranks (2 and 3: of the ranks of one machine):

1. Each rank sends to all others its machine, a secret random token, and whether it can share
   memory.
2. In each pair on one machine, the higher rank connects to the lower one's socket, and sends its
   token and descriptors; then both tell each other whether that succeeded.
3. The lower rank answers with its own token and descriptors. Both map what they received, except a
   store that they have mapped for an earlier group, and tell each other whether that succeeded. The
   pair uses shared memory only if it did for both.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from gradwire.transport import shm_library
from gradwire.transport.protocol import Transport
from gradwire.transport.shm import Shm
from gradwire.transport.shm_sockets import TOKEN, PeerListener, Said, alive, connect

log = logging.getLogger("gradwire")

# Beyond all tags of collectives.
_HELLO_TAG, _CONNECTED_TAG, _MAPPED_TAG = ((1 << 30) - n for n in (4, 3, 2))
_ANSWER_S = 10.0  # within one machine, after the peer has announced the connection
_HELLO = struct.Struct(f"<8s16s{TOKEN}s?")
_NO_STORE = bytes(TOKEN)


@dataclass(frozen=True)
class _Hello:
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
        token = secrets.token_bytes(TOKEN)
        reason = shm_library.unavailable()
        listener = None
        if reason is None:
            try:
                listener = stack.enter_context(closing(PeerListener(token)))
            except OSError as error:
                reason = f"no unix socket: {error}"
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
    listener: PeerListener,
) -> tuple[Shm | None, frozenset[int], str | None]:
    """Steps 2 and 3: this rank's end, the peers it reaches, and why it does not reach another."""
    rank = carrier.rank
    try:
        shm = Shm(rank, carrier.world_size, peers, carrier.timeout)
    except OSError as error:
        for tag in (_CONNECTED_TAG, _MAPPED_TAG):
            _verdicts(carrier, dict.fromkeys(peers, False), tag)
        return None, frozenset(), str(error)
    sockets: dict[int, socket.socket] = {}
    mapped: set[int] = set()
    reasons: list[str] = []
    with ExitStack() as stack:
        for peer in [p for p in peers if p < rank]:
            with _noting(reasons, peer):
                end = stack.enter_context(connect(hellos[peer].token, _ANSWER_S))
                _said(shm, token).send(end)
                sockets[peer] = end
        mine = {p: p > rank or p in sockets for p in peers}
        theirs = _verdicts(carrier, mine, _CONNECTED_TAG)
        agreed = {p: hellos[p].token for p in peers if mine[p] and theirs[p]}
        coming = {p: known for p, known in agreed.items() if p > rank}
        deadline = time.monotonic() + _ANSWER_S
        while coming:
            try:
                end, said = listener.next(deadline - time.monotonic())
            except OSError as error:
                reasons.append(str(error))
                break
            if (found := _rank(said, coming)) is not None:
                del coming[found]
                with _noting(reasons, found), end:
                    _said(shm, token).send(end)
                    _map(shm, found, end, said)
                    mapped.add(found)
        for peer in [p for p in sockets if p in agreed]:
            with _noting(reasons, peer), sockets[peer] as end:
                said = Said.receive(end, stack)
                if _rank(said, {peer: agreed[peer]}) is None:
                    raise PermissionError("another process listens on its socket")
                _map(shm, peer, end, said)
                mapped.add(peer)
        listener.close()  # ends the waits of peers that still expect an answer
    theirs = _verdicts(carrier, {p: p in mapped for p in peers}, _MAPPED_TAG)
    reached = frozenset(p for p in mapped if theirs[p])
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


def _said(shm: Shm, token: bytes) -> Said:
    """What this rank says."""
    store, *fd = shm.lends or (_NO_STORE,)
    return Said(token, store, (shm.fd, *fd))


def _rank(said: Said, tokens: Mapping[int, bytes]) -> int | None:
    """The rank that says this; None: not one of these."""
    found = (p for p, token in tokens.items() if hmac.compare_digest(token, said.token))
    return next(found, None)


def _map(shm: Shm, peer: int, end: socket.socket, said: Said) -> None:
    """Map the peer's segment and its store, if it has one."""
    segment, *store = said.fds
    lends = (said.store, store[0]) if store and said.store != _NO_STORE else None
    shm.connect(peer, segment, alive(end), lends)


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
