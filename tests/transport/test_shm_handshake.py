"""Processes that are no ranks, of this user and of another, come to the sockets of a handshake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gradwire.transport import Hub, shm_handshake
from gradwire.transport.shm import Shm
from gradwire.transport.shm_handshake import Said, connect
from ranks import at_once
from transport.shm_ends import open_files

NOBODY = 65534

# Connects to the sockets of a handshake: with the claim to be a rank, made of what every user can
# see; silent; with half a message; and as often as a queue of connections holds. It listens at the
# last name. Then it tells what it was sent.
STRANGER = """
import json, os, socket, sys
user, sockets, listen = json.loads(sys.argv[1])
if user is not None:
    os.setgroups([]); os.setresgid(user, user, user); os.setresuid(user, user, user)
def come(name, kind):
    end = socket.socket(socket.AF_UNIX, kind)
    end.setblocking(False)
    try:
        end.connect("\\0" + name)
    except BlockingIOError:  # the queue is full
        return None
    ends.append(end)
    return end
def say(end, data, fds=()):
    try:
        socket.send_fds(end, [data], fds)
    except (OSError, AttributeError):  # it was closed, or there is none
        pass
def heard(end):
    end.settimeout(60)
    try:
        data, fds, _, _ = socket.recv_fds(end, 64, 2)
    except ConnectionError:
        return 0
    return len(data) + len(fds)
ends = []
for name, kind in sockets:
    for claim, _ in sockets:
        token = bytes.fromhex(claim.rpartition("-")[2])
        say(come(name, kind), token + bytes(16), [os.memfd_create("claim")])
    come(name, kind)
    say(come(name, kind), b"half")
    for _ in range(140):
        come(name, kind)
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.bind("\\0" + listen)
server.listen()
server.settimeout(60)
print("ready", flush=True)
input()
print(json.dumps(sum(map(heard, ends))), flush=True)
ends = [server.accept()[0]]
print(json.dumps(sum(map(heard, ends))), flush=True)
"""


def own_sockets() -> list[tuple[str, int]]:
    """Names and kinds of this process's sockets for handshakes, as every user sees them."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    ours = [row for row in rows if f"socket:[{row[6]}]" in open_files()]
    found = [row for row in ours if row[-1].startswith("@gradwire-")]
    return sorted({(row[-1][1:], int(row[4], 16)) for row in found})


def handshake(hub: Hub) -> list[frozenset[int]]:
    """The peers that each rank reaches; ranks are threads."""

    def rank(number: int) -> frozenset[int]:
        shm, reached = shm_handshake.share(hub.transport(number))
        if shm is not None:
            shm.close()
        return reached

    reached: list[frozenset[int]] = at_once(*(lambda r=r: rank(r) for r in range(hub.world_size)))
    return reached


@pytest.mark.parametrize("user", [None, NOBODY], ids=["own", "other"])
def test_a_stranger_gets_nothing_and_keeps_no_rank_from_another(
    user: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    if user is not None and os.geteuid():
        pytest.skip("only root can start a process of another user")
    token, strangers = os.urandom(16), []

    def come() -> None:  # while all ranks listen, before they know each other
        sockets = own_sockets()
        assert len(sockets) == 3
        given = json.dumps([user, sockets, shm_handshake._address(token)[1:]])
        command = [sys.executable, "-I", "-S", "-c", STRANGER, given]
        stranger = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        strangers.append(stranger)
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "ready\n"

    all_listen, first = threading.Barrier(3, come), [True] * 3

    def before(source: int, *_: object) -> None:
        if first[source]:
            first[source] = False
            all_listen.wait(60)

    reached = handshake(Hub(3, corrupt=before))
    (stranger,) = strangers
    said = caplog.messages
    try:
        assert reached == [{1, 2}, {0, 2}, {0, 1}]
        if user is None:
            assert not said
            connect(token, 60).close()
        else:
            assert len(said) == 3
            assert all(f"processes of users [{user}], not 0, connected" in text for text in said)
            with pytest.raises(PermissionError, match=f"a process of user {user}"):
                connect(token, 60)
        told, _ = stranger.communicate("\n", 60)
        assert told == "0\n0\n"  # of what it reached, and from whom it was reached
    finally:
        stranger.kill()
        stranger.wait()


def test_ranks_of_different_users_share_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever connects sends nothing before it knows who listens."""
    sent: list[Said] = []
    monkeypatch.setattr(Said, "send", lambda said, _: sent.append(said))
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY - 1)
    assert handshake(Hub(2)) == [frozenset()] * 2
    assert not sent
    assert any(f"rank 0: a process of user {os.getuid()}" in said for said in caplog.messages)


def test_a_pair_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Shm.connect

    def connects(shm: Shm, peer: int, *args: object) -> None:
        if {shm.rank, peer} == {0, 2}:
            raise OSError("no room")
        real(shm, peer, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Shm, "connect", connects)
    assert handshake(Hub(3)) == [{1}, {0, 2}, {1}]
