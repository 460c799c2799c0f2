"""Ranks as threads over the loopback transport, and as processes over gloo; and checks on them.

If one fails, the test's report tells how every rank ended, in chronological order.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

from ends import GRACE, End, ends, raised, report
from fifo import FifoHub
from gradwire import ConfigError
from gradwire.engine import Communicator
from gradwire.transport import Hub

Check = Callable[[int], Any]

WORLD_SIZES = [1, 2, 3, 4, 5, 8]

_checks = count()  # of this process: the same numbers on all ranks


def as_threads(
    world_size: int,
    body: Callable[[Communicator], Any],
    hub: Hub | None = None,
    timeout: float = 60.0,
    fifo: FifoHub | None = None,
) -> list[Any]:
    """Run `body` on all ranks concurrently; returns its results, in rank order.

    Raises the first error, with a report of every rank as its note. Collectives run in order over
    `fifo` if it is given; else with tags, over `hub`.
    """
    hub = hub or Hub(world_size)
    found: dict[int, End] = {}
    errors: dict[int, BaseException] = {}
    links: list[Any] = [lambda device, r=r: fifo and fifo.link(r) for r in range(world_size)]
    comms = [Communicator(hub.transport(r), links=links[r]) for r in range(world_size)]

    def run(rank: int) -> None:
        try:
            found[rank] = End(body(comms[rank]), at=time.monotonic())
        except BaseException as error:
            errors[rank], found[rank] = error, raised(error)

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world_size)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    for rank in hung:
        found[rank] = End(None, "hangs", "", None, time.monotonic(), _stack(threads[rank]))
    every = [found[rank] for rank in range(world_size)]
    said = report(begun, every) if errors or hung else ""
    for comm in comms:
        comm.close()
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


def refuses(said: str, call: Callable[[], Any]) -> str:
    """Assert that `call` raises a ConfigError with this text; returns all that the error says."""
    error = caught(call)
    assert isinstance(error, ConfigError), (said, error)
    assert said in str(error), (said, error)
    return str(error)


def as_processes(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    deadline: float = 120.0,
    expect_death: tuple[int, ...] = (),
    backend: str | None = "gloo",
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `body(rank, *args)` in `world_size` processes; returns its results, in rank order.

    See `ends` for the arguments. Ranks in `expect_death` may die: their result is None. Raises
    `AssertionError` with a report of every rank.
    """
    begun = time.monotonic()
    found = ends(
        world_size, body, *args, timeout=timeout, deadline=deadline, backend=backend,
        environment=environment, unawaited=expect_death, grace=GRACE,
    )  # fmt: skip
    failed = [r for r, e in enumerate(found) if e.error and r not in expect_death]
    if failed:
        failed.sort(key=lambda rank: found[rank].at)
        raise AssertionError(f"ranks {failed} failed; {report(begun, found)}")
    return [end.value for end in found]


def check_each(rank: int, checks: Sequence[Callable[..., Any]], *args: Any) -> dict[str, str]:
    """Run every check, even after one has failed; returns the stacks of those that failed.

    Arguments are (rank, *args), or as many of them as a check has parameters. All ranks wait for
    each other behind every check, through the store, since a failed one may have broken the group;
    where a rank does not end a check that failed on this one, no other check runs.
    """
    return _results(rank, checks, args)[1]


def _results(
    rank: int, checks: Sequence[Callable[..., Any]], args: Sequence[Any]
) -> tuple[list[Any], dict[str, str]]:
    """What the checks returned, and the stacks of those that failed, by name."""
    store = dist.distributed_c10d._get_default_store().clone()  # one client waits at a time
    ranks = range(dist.get_world_size())
    found: list[Any] = []
    failed: dict[str, str] = {}
    for check in checks:
        name = _named(check)
        try:
            found.append(check(*(rank, *args)[: _positional(check)]))
        except BaseException:
            failed[name] = traceback.format_exc()
        number = next(_checks)
        store.set(f"check {number} of {rank}", b"")
        try:
            every = [f"check {number} of {r}" for r in ranks]
            store.wait(every, timedelta(seconds=GRACE if name in failed else 600))
        except dist.DistStoreError:
            failed[name] = f"{failed.get(name, '')}it does not end on all ranks"
            break
        gc.collect()
    return found, failed


def _positional(check: Callable[..., Any]) -> int:
    """How many arguments it takes that have no value yet."""
    kinds = [one.kind for one in inspect.signature(check).parameters.values()]
    return kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _named(check: Callable[..., Any]) -> str:
    """As a call, if it has arguments of its own."""
    if not isinstance(check, functools.partial):
        return str(getattr(check, "__name__", check))
    given = [repr(value)[:80] for value in check.args]
    given += [f"{key}={repr(value)[:80]}" for key, value in check.keywords.items()]
    return f"{check.func.__name__}({', '.join(given)})"


def each(check: Callable[..., Any], *rows: Any) -> list[Check]:
    """The check with each row: an argument behind the rank, or a tuple of several."""
    names = list(inspect.signature(check).parameters)[1:]
    given = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [functools.partial(check, **dict(zip(names, row, strict=False))) for row in given]


def all_pass(
    world_size: int, checks: Sequence[Callable[..., Any]], *args: Any, **how: Any
) -> list[list[Any]]:
    """Run checks on processes that share one start, which costs more than most checks do; returns
    their results, by check in rank order. The error has every one that failed by name.

    See `check_each`, and `as_processes` for `how`.
    """
    found = as_processes(world_size, _results, checks, args, **how)
    faults = [
        f"{name}, rank {rank} of {world_size}:\n{stack}"
        for rank, (_, failed) in enumerate(found)
        for name, stack in failed.items()
    ]
    assert not faults, "\n".join(faults)
    return [list(of) for of in zip(*(results for results, _ in found), strict=True)]


def together(world_size: int, *checks: Check, **how: Any) -> list[list[Any]]:
    """`all_pass` where the group's timeout is longer than its deadline, so that an error that only
    a timeout would tell is a failure."""
    return all_pass(world_size, checks, **{"timeout": 600.0, "deadline": 240.0, **how})
