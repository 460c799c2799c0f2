"""The executor's promises: nothing hangs, nothing lingers, one caller's error is its own."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial

import pytest
import torch

from gradwire import ConfigError, Identity, Options, TransportError, all_reduce
from gradwire.collectives import Collective, Item, prepare
from gradwire.collectives.job import Job
from gradwire.engine import Communicator
from gradwire.lang import rng
from gradwire.partition import Spec
from gradwire.transport import Hub
from ranks import as_threads, caught

KEYS = rng.Keys(0, 0)


def test_a_closed_executor_refuses_at_once() -> None:
    comm = Communicator(Hub(1).transport(0))
    comm.close()
    with pytest.raises(TransportError, match="destroyed"):
        all_reduce(torch.ones(3), group=comm)


def test_closing_ends_jobs_under_way() -> None:
    hub = Hub(2, timeout=60)

    def body(comm: Communicator) -> BaseException | None:
        collective = prepare(comm, [Spec("w", 10, torch.float32, Identity())])
        if comm.rank == 1:
            return None  # never joins in
        future = collective.start([Item(torch.ones(10), KEYS, 0)], average=True)
        time.sleep(0.1)
        begun = time.monotonic()
        comm.close()
        error = future.exception(timeout=5)
        assert time.monotonic() - begun < 5
        return error

    assert isinstance(as_threads(2, body, hub)[0], TransportError)


def test_wrong_input_fails_its_caller_and_nobody_else() -> None:
    def body(comm: Communicator) -> torch.Tensor:
        for bad in (
            {"step": -1},
            {"step": "one"},
            {"residual": torch.zeros(4)},
            {"residual": torch.zeros(3, dtype=torch.float64)},
            {"residual": [0]},
            {"seed": -5},
            {"seed": "a"},
        ):
            error = caught(partial(all_reduce, torch.ones(3), group=comm, **bad))
            assert isinstance(error, ConfigError)
            assert str(error).startswith(next(iter(bad)))
        for what in ([1.0], torch.ones(3).to_sparse(), torch.arange(3)):
            assert isinstance(caught(partial(all_reduce, what, group=comm)), ConfigError)
        good = torch.ones(3)
        all_reduce(good, codec="identity", group=comm)
        return good

    for found in as_threads(2, body):
        assert found.tolist() == [2.0] * 3


def test_memory_that_is_not_what_the_spec_says_never_reaches_a_kernel() -> None:
    def body(comm: Communicator) -> None:
        spec = Spec("w", 100, torch.float32, Identity(), feedback=True)
        collective = prepare(comm, [spec])
        good, residual = torch.zeros(100), torch.zeros(100)
        for item in (
            Item(good[:50], KEYS, 0, residual),
            Item(good.double(), KEYS, 0, residual),
            Item(torch.zeros(200)[::2], KEYS, 0, residual),
            Item(good, KEYS, 0, None),
            Item(good, KEYS, 0, residual[:5]),
            Item(good, KEYS, -1, residual),
        ):
            error = caught(partial(collective.start, [item], average=True))
            assert isinstance(error, ConfigError)
            assert str(error).startswith("w: ")

    as_threads(2, body)


def test_a_finished_job_keeps_nothing_alive() -> None:
    def body(comm: Communicator) -> None:
        tensor = torch.ones(1000)
        all_reduce(tensor, group=comm)
        gone = weakref.ref(tensor)
        del tensor
        deadline = time.monotonic() + 5
        while gone() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert gone() is None

    as_threads(2, body)


def test_waiting_in_a_callback_is_refused() -> None:
    def body(comm: Communicator) -> BaseException | None:
        all_reduce(torch.ones(300), group=comm)
        if comm.rank == 1:
            time.sleep(0.5)  # so that rank 0's callback is there before the result
        future = all_reduce(torch.ones(300), group=comm, async_op=True)
        assert future is not None
        if comm.rank == 1:
            future.wait()
            return None
        errors: list[BaseException | None] = []

        def nested(_: object) -> None:
            errors.append(caught(lambda: all_reduce(torch.ones(3), group=comm)))

        future.then(nested).wait()
        return errors[0]

    error = as_threads(2, body)[0]
    assert isinstance(error, ConfigError)
    assert "async_op" in str(error)


def test_places_free_in_the_order_of_jobs() -> None:
    """Job 1 lasts, since rank 1 joins it late; job 2 is rank 0's alone and ends at once. Job 3 must
    wait for job 1 all the same: its messages would stand in the way of job 1's."""
    hub = Hub(2, timeout=20)
    joined = threading.Event()

    def body(comm: Communicator) -> list[str]:
        running = prepare(comm, [Spec("first", 10, torch.float32, Identity())])
        empty = prepare(comm, [Spec("empty", 0, torch.float32, Identity())])
        started: list[str] = []

        def named(collective: Collective, name: str) -> Job:
            values = torch.ones(collective.specs[0].numel)
            job = Job(collective, [Item(values, KEYS, 0)], average=True)
            start = job.start
            job.start = lambda: (started.append(name), start())  # type: ignore[assignment, func-returns-value]
            return job

        if comm.rank == 1:
            joined.wait(10)
        futures = [
            comm.executor.submit(named(collective, name))
            for collective, name in ((running, "1"), (empty, "2"), (empty, "3"))
        ]
        if comm.rank == 0:
            futures[1].result(timeout=10)
            time.sleep(0.2)
            early = list(started)
            joined.set()
        for future in futures:
            future.result(timeout=10)
        return early if comm.rank == 0 else started

    early, all_of_them = as_threads(2, body, hub)
    assert early == ["1", "2"]
    assert all_of_them == ["1", "2", "3"]


def test_a_result_that_cannot_be_delivered_is_an_error_of_the_future() -> None:
    def body(comm: Communicator) -> BaseException | None:
        tensor = torch.ones(6).view(2, 3).t()  # its result is copied into it
        future = all_reduce(tensor, "identity", group=comm, async_op=True)
        assert future is not None
        return caught(future.wait)

    assert as_threads(2, body) == [None, None]
    expanded = as_threads(
        1, lambda comm: caught(lambda: all_reduce(torch.ones(1).expand(9), group=comm))
    )
    assert isinstance(expanded[0], ConfigError)
    assert "elements share memory" in str(expanded[0])


def test_what_may_differ_between_ranks_may_change_on_one() -> None:
    def body(comm: Communicator) -> float:
        for threads in (1, 2):
            tensor = torch.ones(10)
            chosen = Options(threads=threads if comm.rank == 0 else 1)
            all_reduce(tensor, "identity", group=comm, options=chosen)
        return float(tensor[0])

    assert as_threads(2, body, Hub(2, timeout=5)) == [2.0, 2.0]


def test_a_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Though two threads meet it before either has told the peers."""
    executor = Communicator(Hub(1).transport(0)).executor
    tell, told = executor.transport.fail, []

    def meanwhile(rank: int) -> None:
        told.append(rank)
        if len(told) == 1:
            late = threading.Thread(target=executor._fail, args=(TransportError("second"),))
            late.start()
            late.join(5)
        tell(rank)

    executor.transport.fail = meanwhile
    executor._fail(TransportError("first", peer=0))
    executor.close()
    assert [record.getMessage() for record in caplog.records] == ["first"]
    assert told == [0]
    assert str(executor.error) == "first"
