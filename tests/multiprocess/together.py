"""Several checks in one group of processes: to start a group costs more than most checks do."""

from __future__ import annotations

import functools
import gc
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ranks import as_processes

Check = Callable[[int], Any]

GRACE = 10.0  # seconds that a rank has failed before the others, which may then wait for it


def together(world_size: int, *checks: Check, **how: Any) -> list[list[Any]]:
    """Run `check(rank)` on all ranks, for one check after the other; returns their results, by
    check in rank order.

    A check is a function or a partial of one. Where one fails the next still runs, unless a rank
    hangs; the error names all that failed.

    Args:
        how: of `as_processes`. The group's timeout is longer than its deadline, so that an error
            that only a timeout would tell is a failure.
    """
    wanted = {"timeout": 600.0, "deadline": 240.0, **how}
    found = as_processes(world_size, _one_by_one, checks, **wanted)
    return [list(of) for of in zip(*found, strict=True)]


def _one_by_one(rank: int, checks: tuple[Check, ...]) -> list[Any]:
    store = dist.distributed_c10d._get_default_store().clone()  # one client waits at a time
    ranks = range(dist.get_world_size())
    found: list[Any] = []
    faults: list[str] = []
    for number, check in enumerate(checks):
        fault = ""
        try:
            found.append(check(rank))
        except BaseException:
            fault = f"{_named(check)} failed:\n{traceback.format_exc()}"
            faults.append(fault)
        store.set(f"check {number} {rank}", b"")
        try:
            wait = timedelta(seconds=GRACE if fault else 600)
            store.wait([f"check {number} {peer}" for peer in ranks], wait)
        except dist.DistStoreError:
            faults.append(f"{_named(check)} does not end on all ranks")
            break
        gc.collect()
    assert not faults, "\n".join(faults)
    return found


def _named(check: Check) -> str:
    """As a call."""
    if not isinstance(check, functools.partial):
        return str(getattr(check, "__name__", check))
    given = [repr(value)[:80] for value in check.args]
    given += [f"{key}={repr(value)[:80]}" for key, value in check.keywords.items()]
    return f"{check.func.__name__}({', '.join(given)})"
