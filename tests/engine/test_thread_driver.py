"""The engine's guarantees: no hangs, no leaks, and one caller's error does not affect others."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import Future
from functools import partial

import pytest
import torch

from gradwire import ConfigError, Options, TransportError, all_reduce
from gradwire.codecs import Identity
from gradwire.collectives import Item, ScopeProgram, prepare
from gradwire.engine import Communicator, Engine, Outcome
from gradwire.lang import rng
from gradwire.partition import Spec
from gradwire.transport import Hub
from leftovers import until
from ranks import as_threads, caught, raises
from rooms.collectives import Job
from rooms.engine import workers

KEYS = rng.Keys(0, 0)


def test_memory_that_is_not_what_the_spec_says_never_reaches_a_kernel() -> None:
    def body(comm: Communicator) -> None:
        spec = Spec("w", 100, torch.float32, Identity(), feedback=True)
        collective = prepare(comm.calls, [spec])
        good, residual = torch.zeros(100), torch.zeros(100)
        for item in (
            Item(good[:50], KEYS, 0, residual),
            Item(good.double(), KEYS, 0, residual),
            Item(torch.zeros(200)[::2], KEYS, 0, residual),
            Item(good.to("meta"), KEYS, 0, residual),
            Item(good, KEYS, 0, None),
            Item(good, KEYS, 0, residual[:5]),
            Item(good, KEYS, -1, residual),
        ):
            error = raises(ConfigError, partial(collective.start, [item]))
            assert str(error).startswith("w: ")

    as_threads(2, body)


def test_a_finished_job_keeps_nothing_alive() -> None:
    def body(comm: Communicator) -> None:
        tensor = torch.ones(1000)
        all_reduce(tensor, group=comm)
        gone = weakref.ref(tensor)
        del tensor
        assert until(lambda: gc.collect() >= 0 and gone() is None)

    as_threads(2, body)


def test_waiting_in_a_callback_is_refused() -> None:
    added = threading.Event()

    def body(comm: Communicator) -> BaseException | None:
        all_reduce(torch.ones(300), group=comm)
        if comm.rank == 1:
            assert added.wait(60)  # rank 0 adds its callback before the result
        future = all_reduce(torch.ones(300), group=comm, async_op=True)
        assert future is not None
        if comm.rank == 1:
            future.wait()
            return None
        errors: list[BaseException | None] = []

        def nested(_: object) -> None:
            errors.append(caught(lambda: all_reduce(torch.ones(3), group=comm)))

        then = future.then(nested)
        added.set()
        then.wait()
        return errors[0]

    error = as_threads(2, body)[0]
    assert isinstance(error, ConfigError)
    assert "async_op" in str(error)


def test_tickets_are_returned_in_their_order() -> None:
    """Ticket 0 takes long, since rank 1 joins it late; ticket 1 is only rank 0's and ends at once.
    Ticket 2 still waits for ticket 0: two are admitted at a time, on every rank alike."""
    hub = Hub(2, timeout=60)
    joined = threading.Event()

    def body(comm: Communicator) -> list[str]:
        running = prepare(comm.calls, [Spec("first", 10, torch.float32, Identity())])
        empty = prepare(comm.calls, [Spec("empty", 0, torch.float32, Identity())])
        started: list[str] = []

        def begin(program: ScopeProgram, name: str) -> Future[Outcome]:
            (spec,) = program.rounds[0].parts[0].specs
            ticket, values = comm.calls.ticket(), torch.ones(spec.numel)
            job = Job(program.prepared[0][0], [Item(values, KEYS, 0)], ticket)
            start = job.start
            job.start = lambda: (started.append(name), start())  # type: ignore[assignment, func-returns-value]
            ready: Future[None] = Future()
            ready.set_result(None)
            ticket.next_round(program.issue)
            (future,) = ticket.begin(ready, [lambda _: job])
            ticket.close()
            return future

        assert running.prepared
        assert empty.prepared
        if comm.rank == 1:
            joined.wait(60)
        futures = [begin(*one) for one in ((running, "0"), (empty, "1"), (empty, "2"))]
        if comm.rank == 0:
            futures[1].result(timeout=60)
            behind = threading.Event()
            comm.runs.resume(behind.set)  # on the lane on which ticket 2 would start
            assert behind.wait(60)
            early = list(started)
            joined.set()
        for future in futures:
            future.result(timeout=60)
        return early if comm.rank == 0 else started

    early, all_of_them = as_threads(2, body, hub)
    assert early == ["0", "1"]
    assert all_of_them == ["0", "1", "2"]


def test_what_may_differ_between_ranks_may_change_on_one() -> None:
    def body(comm: Communicator) -> float:
        for threads in (1, 2):
            tensor = torch.ones(10)
            chosen = Options(threads=threads if comm.rank == 0 else 1)
            all_reduce(tensor, "identity", group=comm, options=chosen)
        return float(tensor[0])

    assert as_threads(2, body) == [2.0, 2.0]


def test_a_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Although two threads meet it before either has told the peers."""
    comm = Communicator(Hub(1).transport(0))
    tell, told = comm.transport.fail, []

    def meanwhile(rank: int) -> None:
        told.append(rank)
        if len(told) == 1:
            late = threading.Thread(target=comm.fail, args=(TransportError("second"),))
            late.start()
            late.join(60)
        tell(rank)

    comm.transport.fail = meanwhile  # type: ignore[method-assign]
    comm.fail(TransportError("first", peer=0))
    comm.close()
    assert [record.getMessage() for record in caplog.records] == ["first"]
    assert told == [0]
    assert str(comm.error) == "first"


def test_threads_are_held_only_by_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight idle groups hold no threads, and idle threads end."""
    monkeypatch.setattr(Engine, "_current", None)
    monkeypatch.setattr(workers, "_IDLE_S", 0.2)

    def body(comm: Communicator) -> None:
        all_reduce(torch.ones(100), group=comm)

    for _ in range(8):
        as_threads(2, body)
    held = Engine.current().workers
    assert until(lambda: len(held) == 0)
    Engine.current().channel.close()
