"""The end of shared memory: last sends go out, forged bytes are noticed, and nothing is left."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from gradwire.transport import shm
from gradwire.transport.shm import Shm
from transport.shm_ends import at_once, ends, failing, forged, nothing


def test_closing_lets_the_last_sends_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "_LINGER_S", 60.0)  # of a machine that is slow
    with ends(2, 60.0, ring_bytes=1 << 12) as (a, b):
        inbox = nothing(1_000_000)
        coming = b.irecv(inbox, 0, 0)
        a.isend(torch.ones(1_000_000, dtype=torch.uint8), 1, 0)
        at_once(a.close, coming.wait)
        assert bool(inbox.all())


def test_what_is_not_a_frame_is_noticed() -> None:
    with forged() as (end, write):
        coming = end.irecv(nothing(), 1, 0)
        write(0, 8192, 77)  # a tag that was not announced
        write(0, 4096, 64)  # bytes written
        error = failing(coming.wait)
        assert error.peer == 1
        assert "invalid data" in str(error)


def test_a_segment_of_another_size_is_refused() -> None:
    first, second = Shm(0, 2, [1], 5.0, 1 << 12), Shm(1, 2, [0], 5.0, 1 << 13)
    alive = os.pidfd_open(os.getpid())
    with pytest.raises(OSError, match="Invalid argument"):
        first.connect(1, second.fd, alive)
    os.close(alive)
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
