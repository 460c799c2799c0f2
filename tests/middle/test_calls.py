"""Calls that do not match, and groups destroyed during calls: an error on every rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transports import over_both

import gradwire as gw
from ends import End, ended, ends, finished
from products import one_in
from ranks import caught, raises
from stress.worlds import of_transport

pytestmark = [pytest.mark.multiprocess, *over_both(3)]


# A failure that only this timeout of the groups ends was not noticed: ranks hang by then.
LIMIT, DEADLINE_S = timedelta(seconds=200), 120.0
NAMED = (gw.TransportError, gw.ConfigError, gw.CodecError)


# ---- another order of calls on one rank


def reduces(numel: int, **how: Any) -> Any:
    return gw.all_reduce(torch.ones(numel), "identity", **how)


def gathers(numel: int, **how: Any) -> Any:
    whole = torch.empty(numel * dist.get_world_size())
    return gw.all_gather(whole, torch.ones(numel), "identity", **how)


Calls = list[tuple[Callable[..., Any], int]]

# The call of most ranks, the call of rank 1, and what the error must contain.
CASES: dict[str, tuple[Calls, Calls, tuple[str, ...]]] = {
    "kind": ([(reduces, 4096)], [(gathers, 4096)], ("all_reduce", "all_gather")),
    "size": ([(reduces, 4096)], [(reduces, 1000)], ("4096", "1000")),
    "new": ([(reduces, 4096)], [(gathers, 12_345)], ("all_reduce", "all_gather")),
    "order": ([(reduces, 4096), (gathers, 4096)], [(gathers, 4096), (reduces, 4096)], ()),
}


def test_another_call_on_one_rank(rank: int) -> None:
    """Awaited at once or later, it is named on all ranks."""
    for (case, (most, other, said)), later in product(CASES.items(), (False, True)):
        group = dist.new_group(timeout=LIMIT)
        for step in range(3):
            reduces(4096, group=group, step=step)
            reduces(1000, group=group, step=step)
            gathers(4096, group=group, step=step)
        dist.barrier()
        how: dict[str, Any] = {"group": group, "step": 7, "async_op": later}

        def act(calls: Calls = other if rank == 1 else most, how: dict[str, Any] = how) -> None:
            for future in [call(numel, **how) for call, numel in calls]:
                if future is not None:
                    future.wait()

        error = caught(act)
        assert isinstance(error, NAMED), (case, later, error)
        assert all(word in str(error) for word in ("rank 1", *said)), (case, later, error)
        dist.barrier()


# ---- groups that are destroyed


def destroyed(rank: int, own: bool) -> End | None:
    """Rank 0 destroys the group while it and rank 2 wait in a call that rank 1 never makes."""
    store = dist.distributed_c10d._get_default_store().clone()
    group = dist.new_group(timeout=LIMIT) if own else None
    for step in range(3):
        reduces(4096, group=group, step=step)
    dist.barrier(group)
    if rank == 1:
        store.wait(["ended 0", "ended 2"])
        return None
    found: list[End] = []
    waiting = threading.Thread(
        target=lambda: found.append(ended(lambda: reduces(4096, group=group, step=7)))
    )
    waiting.start()
    if rank == 0:
        time.sleep(0.5)  # both wait by now, or come later: both must do
        dist.destroy_process_group(group)
    waiting.join()
    store.set(f"ended {rank}", b"")
    return found[0]


@pytest.mark.parametrize(("own", "shm"), one_in(3, product([False, True], [False, True])))
def test_a_destroyed_group_ends_what_waits(own: bool, shm: bool) -> None:
    """On all ranks, long before the timeout."""
    found = ends(3, destroyed, own, timeout=200, deadline=DEADLINE_S, environment=of_transport(shm))
    finished(found)
    for rank in (0, 2):
        got = found[rank].value
        assert got.error == "TransportError", f"rank {rank}: {got}"
        assert "destroyed" in got.text, f"rank {rank}: {got}"
    assert "rank 0" in found[2].value.text


def test_what_a_destroyed_group_has_finished_is_not_disturbed(rank: int) -> None:
    """Rank 0 destroys each group as soon as its own calls are done; the others may still wait."""
    for _ in range(4):
        group = dist.new_group(timeout=LIMIT)
        futures = []
        for step in range(4):
            values = torch.full((50_000,), float(rank))
            futures.append(gw.all_reduce(values, group=group, step=step, async_op=True))
        if rank == 2:
            time.sleep(0.05)
        for future in futures:
            assert future is not None
            future.wait()
        dist.destroy_process_group(group)


def test_a_group_after_one_that_failed(rank: int) -> None:
    """A group that failed is destroyed, and a new one of the same ranks works."""
    group = dist.new_group(timeout=LIMIT)
    reduces(100, group=group)
    function, numel = (gathers, 400) if rank == 1 else (reduces, 300)
    raises(NAMED, lambda: function(numel, group=group, step=1))
    dist.destroy_process_group(group)
    fresh = dist.new_group(timeout=LIMIT)
    values = torch.full((100,), float(rank))
    gw.all_reduce(values, "identity", group=fresh)
    assert torch.equal(values, torch.full((100,), 3.0))
