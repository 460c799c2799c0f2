"""A test whose ranks fail reports how every rank ended, in chronological order."""

from __future__ import annotations

import os
import re
import threading
import time

import pytest
import torch.distributed as dist

import ranks
from gradwire import CodecError, TransportError
from gradwire.engine import Communicator
from ranks import all_pass, as_processes, as_threads


def heads(said: str) -> list[str]:
    """ "RANK HOW" per rank of a report, in its order, which must be chronological."""
    found = re.findall(r"^\+(\d+\.\d{3}) s: rank (\d) (failed|returned|still runs)$", said, re.M)
    times = [float(at) for at, _, _ in found]
    assert times == sorted(times)
    return [f"{rank} {how}" for _, rank, how in found]


def test_of_threads_the_first_error_is_raised_and_all_are_told() -> None:
    first, begun = [], threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            begun.wait()
            first[0].join()  # rank 1's end is recorded
            raise TransportError("a peer is gone")
        if comm.rank == 1:
            first.append(threading.current_thread())
            begun.set()
            raise CodecError("what it sent cannot be decoded")

    with pytest.raises(CodecError, match="cannot be decoded") as raised:
        as_threads(3, body)
    (said,) = raised.value.__notes__
    assert sorted(heads(said)) == ["0 failed", "1 failed", "2 returned"]
    assert "TransportError: a peer is gone" in said


def test_a_thread_that_hangs_is_told_with_the_errors_of_others() -> None:
    released = threading.Event()

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            released.wait()
        if comm.rank == 1:
            raise CodecError("what it sent cannot be decoded")

    with pytest.raises(AssertionError, match=r"ranks \[0\] hang") as raised:
        as_threads(3, body, timeout=2)
    released.set()
    said = str(raised.value)
    assert sorted(heads(said)) == ["0 still runs", "1 failed", "2 returned"]
    assert heads(said)[-1] == "0 still runs"
    assert "released.wait()" in said
    assert "CodecError: what it sent cannot be decoded" in said


def fail_in_turn(rank: int) -> int:
    dist.barrier()
    if rank == 2:
        os._exit(7)
    if rank < 2:
        raise ValueError(f"it is rank {rank} that says so")
    return rank


def goes_on(rank: int) -> None:
    if rank == 1:
        raise ValueError("too soon")
    while True:
        time.sleep(60)


@pytest.mark.multiprocess
def test_of_processes_all_errors_are_told() -> None:
    with pytest.raises(AssertionError, match="failed") as raised:
        as_processes(4, fail_in_turn)
    said = str(raised.value)
    assert sorted(heads(said)) == ["0 failed", "1 failed", "2 failed", "3 returned"]
    assert "exit code 7, without a report" in said
    assert "ValueError: it is rank 0 that says so" in said
    assert "ValueError: it is rank 1 that says so" in said


@pytest.mark.multiprocess
def test_processes_that_go_on_after_a_failure_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE", 1.0)
    with pytest.raises(AssertionError, match=r"ranks \[1, 0\] failed") as raised:
        as_processes(2, goes_on, deadline=3600)  # without the grace, pytest's own timeout ends it
    assert heads(str(raised.value)) == ["1 failed", "0 still runs"]


def passes(rank: int) -> None:
    assert rank in (0, 1)


def fails_on_one(rank: int, told: str) -> None:
    assert rank == 0, told


def passes_later() -> None:
    dist.barrier()


@pytest.mark.multiprocess
def test_of_checks_that_share_processes_each_that_fails_is_named() -> None:
    with pytest.raises(AssertionError) as raised:
        all_pass(2, [passes, fails_on_one, passes_later], "what was told")
    said = str(raised.value)
    assert said.startswith("fails_on_one, rank 1 of 2:\n")
    assert "AssertionError: what was told" in said
    assert "passes" not in said
    all_pass(2, [passes, passes_later])
