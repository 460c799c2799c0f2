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
from ranks import Crew, Start, as_processes, as_threads, on, rows_of


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


def fails_on_one(rank: int) -> None:
    assert rank == 0, "what was told"


@pytest.mark.multiprocess
def test_of_tests_that_share_processes_each_that_fails_is_told() -> None:
    crew = Crew()
    try:
        crew.run(Start(), passes)
        with pytest.raises(AssertionError, match=r"ranks \[1\] failed") as raised:
            crew.run(Start(), fails_on_one)
        assert "AssertionError: what was told" in str(raised.value)
        crew.run(Start(), passes)
    finally:
        crew.close()


ROWS = [(2, ("a", 1), {}), (3, ("b", 2), {"exhaustive": True, "backend": "gradwire"})]


def test_rows_have_their_ranks_and_names() -> None:
    def test(rank: int, text: str, number: int, tmp_path: object) -> None:
        pass

    marks = [on(ranks, row, **how).mark for ranks, row, how in ROWS]
    names, runs = rows_of(test, marks)
    assert names == ["rank", "text", "number"]
    assert [run.values for run in runs] == [
        (Start(2), "a", 1), (Start(3, (("backend", "gradwire"),)), "b", 2),
    ]  # fmt: skip
    assert [run.id for run in runs] == ["2-a-1", "3-b-2"]
    assert [len(run.marks) for run in runs] == [0, 1]
