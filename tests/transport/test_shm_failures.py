"""Every wait on shared memory ends: with delivery, or with an error that names the peer."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from gradwire.errors import TransportError
from gradwire.transport import shm
from gradwire.transport.shm import Shm
from transport.shm_ends import at_once, ends


def nothing(size: int = 1) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def failing(body: Callable[[], object]) -> TransportError:
    """The error that `body` raises; ends here have longer timeouts than this waits."""

    def raises() -> TransportError:
        with pytest.raises(TransportError) as caught:
            body()
        return caught.value

    (error,) = at_once(raises)
    assert isinstance(error, TransportError)
    return error


def test_silence_ends_in_an_error_that_names_the_peer() -> None:
    with ends(2, timeout=0.3) as (a, _):
        error = failing(a.irecv(nothing(), 1, 0).wait)
        assert error.peer == 1
        assert "timeout of 0.3 s" in str(error)
        assert failing(lambda: a.isend(nothing(), 1, 0)) is error  # broken from now on
    with ends(2, timeout=0.3) as (a, _):
        assert failing(a.isend(nothing(), 1, 0).wait).peer == 1  # nobody receives it


def test_another_size_is_an_error() -> None:
    for sent, expected in ((3, 4), (100_000, 4), (4, 100_000), (0, 1)):
        with ends(2, ring_bytes=1 << 12) as (a, b):
            coming = b.irecv(nothing(expected), 0, 0)
            a.isend(nothing(sent), 1, 0).wait()
            error = failing(coming.wait)
            assert f"rank 0 sent {sent} bytes where {expected} were expected" in str(error)
            assert error.peer == 0


def test_closing_ends_our_waits() -> None:
    with ends(2, timeout=600) as (a, _):
        coming = a.irecv(nothing(), 1, 0)
        threading.Timer(0.2, a.close).start()
        assert "destroyed" in str(failing(coming.wait))
        assert "destroyed" in str(failing(lambda: a.irecv(nothing(), 1, 0)))
        assert "destroyed" in str(failing(coming.wait))


def test_a_peer_that_closes_ends_our_waits_for_it() -> None:
    with ends(3, timeout=600) as (a, b, c):
        coming, other = a.irecv(nothing(), 1, 0), a.irecv(nothing(), 2, 0)
        threading.Timer(0.2, b.close).start()
        error = failing(coming.wait)
        assert error.peer == 1
        assert "destroyed its process group" in str(error)
        c.isend(nothing(), 0, 0)
        other.wait()  # what another peer has sent still arrives


def test_closing_lets_the_last_sends_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "_LINGER_S", 60.0)  # of a machine that is slow
    with ends(2, 60.0, ring_bytes=1 << 12) as (a, b):
        inbox = nothing(1_000_000)
        coming = b.irecv(inbox, 0, 0)
        a.isend(torch.ones(1_000_000, dtype=torch.uint8), 1, 0)
        at_once(a.close, coming.wait)
        assert bool(inbox.all())


def test_a_peer_that_failed_ends_our_waits_and_says_who_is_to_blame() -> None:
    with ends(3, timeout=600) as (a, b, _):
        early, late = nothing(), nothing()
        coming = [a.irecv(early, 1, 0), a.irecv(late, 1, 1)]
        b.isend(torch.ones(1, dtype=torch.uint8), 0, 0).wait()
        b.fail(2)
        coming[0].wait()  # it arrived before
        assert early.item() == 1
        assert failing(coming[1].wait).peer == 2


def test_failing_ends_our_own_waits() -> None:
    with ends(2, timeout=600) as (a, _):
        coming = a.irecv(nothing(), 1, 0)
        threading.Timer(0.2, a.fail, (1,)).start()
        failing(coming.wait)


def test_what_is_not_a_frame_is_noticed() -> None:
    first = Shm(0, 2, [1], 5.0, 1 << 12)
    second = Shm(1, 2, [0], 5.0, 1 << 12)
    first.connect(1, second.fd, os.pidfd_open(os.getpid()))
    segment = mmap.mmap(first.fd, first.nbytes)
    coming = first.irecv(nothing(), 1, 0)
    segment[8192:8200] = (77).to_bytes(8, "little")  # a tag that was not announced
    segment[4096:4104] = (64).to_bytes(8, "little")  # bytes written
    error = failing(coming.wait)
    assert error.peer == 1
    assert "invalid data" in str(error)
    first.close()
    second.close()


def test_a_segment_of_another_size_is_refused() -> None:
    first, second = Shm(0, 2, [1], 5.0, 1 << 12), Shm(1, 2, [0], 5.0, 1 << 13)
    alive = os.pidfd_open(os.getpid())
    with pytest.raises(OSError, match="Invalid argument"):
        first.connect(1, second.fd, alive)
    os.close(alive)
    first.close()
    second.close()


def test_a_peer_whose_process_ends_is_noticed_soon() -> None:
    """Messages that it has sent before still arrive."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    first, second = Shm(0, 2, [1], 600.0), Shm(1, 2, [0], 600.0)
    first.connect(1, second.fd, os.pidfd_open(process.pid))
    second.connect(0, first.fd, os.pidfd_open(os.getpid()))
    coming = [first.irecv(nothing(), 1, tag) for tag in range(2)]
    second.isend(nothing(), 0, 0).wait()
    process.kill()
    process.wait()
    coming[0].wait()
    error = failing(coming[1].wait)
    assert error.peer == 1
    assert "its process has ended" in str(error)
    first.close()
    second.close()


def test_nothing_is_left_of_an_end() -> None:
    def held() -> tuple[set[str], str]:
        with open("/proc/self/maps") as file:
            maps = "".join(line for line in file if "memfd:gradwire" in line)
        return set(os.listdir("/proc/self/fd")), maps

    with ends(2):  # opens what is opened once per process
        pass
    gc.collect()  # what earlier tests left
    before = held()
    with ends(3) as (a, *_):
        assert "memfd:gradwire" in held()[1]
        coming = a.irecv(nothing(1000), 1, 0)
    after = held()
    assert not after[0] - before[0]
    assert not set(after[1].splitlines()) - set(before[1].splitlines())
    failing(coming.wait)
