"""Ranks as threads over the loopback transport, and as processes over gloo.

A test whose first argument is `rank` is run by every rank, in processes that the tests of a file
share: by two ranks, or as its marks say:

    @on(3, ROW, ..., exhaustive=True, backend="gradwire")

or by several numbers of ranks, as a tuple. Each row has the arguments behind the rank, as a tuple
if there are several; fixtures come after them. `exhaustive`: `make test` leaves these rows out;
other names are arguments of `Processes`. If a rank fails, the report tells how every rank ended, in
chronological order.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from ends import GRACE, End, Processes, ends, raised, report
from fifo import FifoHub
from gradwire import ConfigError, TransportError
from gradwire.engine import Communicator
from gradwire.transport import Hub

WORLD_SIZES = [1, 2, 3, 4, 5, 8]


def as_threads(
    world_size: int,
    body: Callable[[Communicator], Any],
    hub: Hub | None = None,
    timeout: float = 60.0,
    fifo: FifoHub | None = None,
) -> list[Any]:
    """Run `body` on all ranks concurrently, as `at_once`; collectives run in order over `fifo` if
    it is given; else with tags, over `hub`."""
    hub = hub or Hub(world_size)
    links: list[Any] = [lambda device, r=r: fifo and fifo.link(r) for r in range(world_size)]
    comms = [Communicator(hub.transport(r), links=links[r]) for r in range(world_size)]
    try:
        return at_once(*(functools.partial(body, comm) for comm in comms), seconds=timeout)
    finally:
        for comm in comms:
            comm.close()


def at_once(*bodies: Callable[[], Any], seconds: float = 60.0) -> list[Any]:
    """Run each in its own thread, a rank; returns their results, in rank order.

    Raises the first error, with a report of every rank as its note.
    """
    found: dict[int, End] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = End(bodies[rank](), at=time.monotonic())
        except BaseException as error:
            errors[rank], found[rank] = error, raised(error)

    ranks = range(len(bodies))
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    for rank in hung:
        found[rank] = End(None, "hangs", "", None, time.monotonic(), _stack(threads[rank]))
    every = [found[rank] for rank in ranks]
    said = report(begun, every) if errors or hung else ""
    assert not hung, f"ranks {hung} hang; {said}"
    for rank in sorted(errors, key=lambda rank: found[rank].at):
        errors[rank].__notes__ = [*getattr(errors[rank], "__notes__", ()), said]  # Python 3.10
        raise errors[rank]
    return [end.value for end in every]


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else ""


def caught(body: Callable[[], Any]) -> BaseException | None:
    """The error that `body` raises."""
    try:
        body()
    except BaseException as error:
        return error
    return None


def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any], *said: str
) -> Any:
    """Assert that `call` raises such an error with all these texts; returns the error."""
    error = caught(call)
    assert isinstance(error, kind), (said, error)
    assert all(one in str(error) for one in said), (said, error)
    return error


def raises_alone(
    rank: int, raising: int, kind: type[BaseException], call: Callable[[], Any], *said: str
) -> None:
    """Assert that `call` raises a rank's own error on this one, and on the others a TransportError
    that blames it, with all these texts."""
    if rank == raising:
        raises(kind, call)
    else:
        assert raises(TransportError, call, *said).peer == raising


def refuses(said: str, call: Callable[[], Any]) -> str:
    """Assert that `call` raises a ConfigError with this text; returns all that the error says."""
    return str(raises(ConfigError, call, said))


def as_processes(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    expect_death: tuple[int, ...] = (),
    **how: Any,
) -> list[Any]:
    """Run `body(rank, *args)` in `world_size` processes; returns its results, in rank order.

    See `ends` for `how`. Ranks in `expect_death` may die: their result is None. Raises
    `AssertionError` with a report of every rank.
    """
    begun, how = time.monotonic(), {"timeout": 60.0, "deadline": 120.0, "grace": GRACE, **how}
    found = ends(world_size, body, *args, unawaited=expect_death, **how)
    all_returned(begun, found, expect_death)
    return [end.value for end in found]


def all_returned(begun: float, found: Sequence[End], but: Collection[int] = ()) -> None:
    """Assert it of these ranks, but for some, with a report of every rank."""
    failed = [rank for rank, end in enumerate(found) if end.error and rank not in but]
    failed.sort(key=lambda rank: found[rank].at)
    assert not failed, f"ranks {failed} failed; {report(begun, found)}"


# ---- tests of which every rank runs the body


on = pytest.mark.on


@dataclass(frozen=True)
class Start:
    """Of processes that share a group: how many, and the arguments of `Processes` as pairs."""

    ranks: int = 2
    how: tuple[tuple[str, Any], ...] = ()


def rows_of(test: Callable[..., None], marks: Sequence[pytest.Mark]) -> tuple[list[str], list[Any]]:
    """For `parametrize`: the names of arguments, and their values in each run."""
    runs = []
    for mark in marks:
        ranks, *rows = mark.args
        how = {**mark.kwargs}
        kept = [pytest.mark.exhaustive] if how.pop("exhaustive", False) else []
        for size, row in product(ranks if isinstance(ranks, tuple) else (ranks,), rows or [()]):
            values = row if isinstance(row, tuple) else (row,)
            words = [str(getattr(one, "__name__", one)) for one in (size, *values)]
            # Without addresses, in which the workers of a run differ.
            named = "-".join(re.sub(r"<function (\w+) at 0x\w+>", r"\1", one)[:30] for one in words)
            start = Start(size, tuple(how.items()))
            runs.append(pytest.param(start, *values, id=named, marks=kept))
    names = list(inspect.signature(test).parameters)
    return names[: len(runs[0].values)], runs


class Crew:
    """The processes that run a file's tests, one test after another, until one fails."""

    def __init__(self) -> None:
        self._start: Start | None = None
        self._processes: Processes | None = None

    def run(self, start: Start, test: Callable[..., None], *args: Any, **given: Any) -> None:
        """Run `test(rank, *args, **given)` on all ranks, which must return."""
        if self._start != start:
            self.close()
            # An error that only a timeout of the group would tell is a failure.
            how = {"timeout": 600.0, **dict(start.how)}
            self._start, self._processes = start, Processes(start.ranks, **how)
        assert self._processes is not None
        begun = time.monotonic()
        body = functools.partial(test, **given)
        found = self._processes.run(body, *args, deadline=240.0, grace=GRACE)
        if any(end.error for end in found):
            self.close()
        all_returned(begun, found)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()
        self._start = self._processes = None


def one_by_one(world_size: int, tests: Iterable[Callable[..., None]], *args: Any) -> None:
    """Run `test(rank, *args)` for each test, in processes that they share."""
    crew = Crew()
    try:
        for test in tests:
            crew.run(Start(world_size), test, *args)
    finally:
        crew.close()
