"""Calls that do not match, and groups destroyed during calls: errors in time, on every rank."""

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

import gradwire as gw
from ends import End, ends, finished, raised
from products import EXHAUSTIVE, one_in
from stress.worlds import of_transport

pytestmark = pytest.mark.multiprocess

BOUND_S = 2.0
LIMIT = timedelta(seconds=8)
NAMED = ("TransportError", "ConfigError", "CodecError")
over = pytest.mark.parametrize(
    "shm", [pytest.param(False, marks=EXHAUSTIVE), True], ids=["gloo", "shm"]
)


def caught(action: Callable[[], Any]) -> tuple[End, float]:
    """How an action ends, and the seconds that it took."""
    begun = time.monotonic()
    try:
        return End(action(), at=time.monotonic()), time.monotonic() - begun
    except Exception as error:
        return raised(error), time.monotonic() - begun


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


def other_calls(rank: int) -> dict[str, tuple[End, float]]:
    """Per case, awaited at once or later: how it ends on this rank, and after how many seconds."""
    found = {}
    for case, (most, other, _) in CASES.items():
        for asynchronous in (False, True):
            group = dist.new_group(timeout=LIMIT)
            for step in range(3):
                reduces(4096, group=group, step=step)
                reduces(1000, group=group, step=step)
                gathers(4096, group=group, step=step)
            dist.barrier()

            def act(
                calls: Calls = other if rank == 1 else most,
                how: dict[str, Any] = {"group": group, "step": 7, "async_op": asynchronous},  # noqa: B006
            ) -> None:
                for future in [call(numel, **how) for call, numel in calls]:
                    if future is not None:
                        future.wait()

            found[f"{case}, {'async' if asynchronous else 'waiting'}"] = caught(act)
            dist.barrier()
    return found


@over
def test_another_call_on_one_rank(shm: bool) -> None:
    found = ends(3, other_calls, timeout=30, deadline=120, environment=of_transport(shm))
    finished(found)
    wrong = []
    for rank, end in enumerate(found):
        for case, (got, seconds) in end.value.items():
            words = ("rank 1", *CASES[case.split(",")[0]][2])
            if got.error not in NAMED or seconds > BOUND_S or any(w not in got.text for w in words):
                wrong.append(f"{case}: rank {rank} after {seconds:.1f} s, {got}")
    assert not wrong, "\n".join(wrong)


def late_but_alike(rank: int) -> float:
    """A late rank, within the timeout, is no error."""
    for step in range(3):
        reduces(4096, step=step)
        if rank == 1:
            time.sleep(2.5)
    return float(dist.get_rank())


@EXHAUSTIVE
def test_being_late_is_no_difference() -> None:
    finished(ends(3, late_but_alike, timeout=8))


# ---- groups that are destroyed


def destroyed(rank: int, own: bool) -> dict[str, Any]:
    """Rank 0 destroys the group while it and rank 2 wait in a call that rank 1 never makes."""
    group = dist.new_group(timeout=LIMIT) if own else None
    for step in range(3):
        reduces(4096, group=group, step=step)
    dist.barrier(group)
    if rank == 1:
        time.sleep(LIMIT.total_seconds() + 1)
        return {}
    found: dict[str, Any] = {}
    waiting = threading.Thread(
        target=lambda: found.update(call=caught(lambda: reduces(4096, group=group, step=7)))
    )
    waiting.start()
    if rank == 0:
        time.sleep(0.7)
        found["at"] = begun = time.monotonic()
        dist.destroy_process_group(group)
        found["destroying"] = time.monotonic() - begun
    waiting.join()
    return found


@pytest.mark.parametrize(("own", "shm"), one_in(4, product([False, True], [False, True])))
def test_a_destroyed_group_ends_what_waits(own: bool, shm: bool) -> None:
    found = ends(3, destroyed, own, timeout=8, environment=of_transport(shm))
    finished(found)
    at = found[0].value["at"]
    assert found[0].value["destroying"] < BOUND_S, found[0].value
    for rank in (0, 2):
        got, _ = found[rank].value["call"]
        assert got.error == "TransportError", f"rank {rank}: {got}"
        assert got.at - at < BOUND_S, f"rank {rank} after {got.at - at:.1f} s: {got}"
        assert "destroyed" in got.text, f"rank {rank}: {got}"
    assert "rank 0" in found[2].value["call"][0].text


def destroyed_behind(rank: int) -> None:
    """Rank 0 destroys each group as soon as its own calls are done; the others may still wait."""
    for _ in range(10):
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


@over
def test_what_a_destroyed_group_has_finished_is_not_disturbed(shm: bool) -> None:
    found = ends(3, destroyed_behind, timeout=8, environment=of_transport(shm))
    finished(found)


def used_again(rank: int) -> None:
    """A group that failed is destroyed, and a new one of the same ranks works."""
    group = dist.new_group(timeout=LIMIT)
    reduces(100, group=group)
    function, numel = (gathers, 400) if rank == 1 else (reduces, 300)
    got, _ = caught(lambda: function(numel, group=group, step=1))
    assert got.error in NAMED, str(got)
    dist.destroy_process_group(group)
    fresh = dist.new_group(timeout=LIMIT)
    values = torch.full((100,), float(rank))
    gw.all_reduce(values, "identity", group=fresh)
    assert torch.equal(values, torch.full((100,), 1.0))


def test_a_group_after_one_that_failed() -> None:
    found = ends(2, used_again, timeout=8)
    finished(found)
