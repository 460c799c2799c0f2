"""A rank that dies or hangs in a collective is named by every survivor (law 10)."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from products import one_in
from ranks import as_processes, caught

pytestmark = pytest.mark.multiprocess

# A failure that only this timeout of the groups ends was not noticed: ranks hang by then.
TIMEOUT_S, DEADLINE_S = 100.0, 60.0

Report = tuple[str, int | None, str]


def reported(action: Any) -> Report:
    """Type, peer and text of the error that `action` raises."""
    error = caught(action)
    return type(error).__name__, getattr(error, "peer", None), str(error)


def reduce_until(rank: int, dying: int, blow: signal.Signals) -> Report:
    """All-reduces in a loop; after a while rank `dying` gets signal `blow` during one."""
    tensor = torch.randn(1_000_000)
    gw.all_reduce(tensor)
    if rank == dying:
        threading.Timer(0.5, os.kill, (os.getpid(), blow)).start()

    def forever() -> None:
        for step in range(1_000_000):
            gw.all_reduce(tensor, op="avg", step=step)

    return reported(forever)


def backward_after_death(rank: int, dying: int) -> Report:
    model = DDP(nn.Sequential(nn.Linear(100, 50), nn.Linear(50, 10)))
    gw.attach(model)
    for _ in range(3):
        model(torch.randn(4, 100)).sum().backward()
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    return reported(lambda: model(torch.randn(4, 100)).sum().backward())


def double_backward_after_death(rank: int, dying: int) -> Report:
    """For a module without compressed parameters."""
    model = DDP(nn.Linear(100, 50).double())
    gw.attach(model)
    for _ in range(3):  # DDP itself communicates in the second, to rebuild its buckets
        model(torch.randn(4, 100).double()).sum().backward()
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    return reported(lambda: model(torch.randn(4, 100).double()).sum().backward())


def attach_without_a_peer(rank: int) -> Report:
    model = DDP(nn.Linear(10, 10))
    while rank == 1:
        time.sleep(60)  # never attaches; killed when the other has reported
    return reported(lambda: gw.attach(model))


def states_of_two_steps(rank: int) -> Report:
    """One rank resumes from an older checkpoint than the other."""
    model = DDP(nn.Linear(100, 50))
    handle = gw.attach(model, "rotated")
    states = []
    for _ in range(2):
        model(torch.randn(4, 100)).sum().backward()
        states.append(handle.state_dict())
    handle.load_state_dict(states[rank])
    return reported(lambda: model(torch.randn(4, 100)).sum().backward())


def slow_once_then_another_dies(rank: int) -> Report:
    """Rank 0 keeps its peers waiting, within the timeout; much later rank 2 dies."""
    tensor = torch.randn(100_000)
    gw.all_reduce(tensor)
    if rank == 0:
        time.sleep(6.8)
    for step in range(3):
        gw.all_reduce(tensor, step=step)
        time.sleep(1)  # time for the peers' notices about rank 0 to be withdrawn
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return reported(lambda: gw.all_reduce(tensor, step=5))


@pytest.mark.timing
def test_a_slow_rank_that_recovered_is_not_blamed() -> None:
    reports = as_processes(3, slow_once_then_another_dies, timeout=8, expect_death=(2,))
    for rank in (0, 1):
        kind, peer, text = reports[rank]
        assert (kind, peer) == ("TransportError", 2), text


def named(dying: int, world_size: int, body: Any, *args: Any, timeout: float = TIMEOUT_S) -> None:
    """Every survivor blames the rank that dies, and stops or stays away."""
    reports = as_processes(
        world_size, body, *args, timeout=timeout, deadline=DEADLINE_S, expect_death=(dying,)
    )
    for rank, report in enumerate(reports):
        if rank != dying:
            kind, peer, text = report
            assert (kind, peer) == ("TransportError", dying), text
            assert f"rank {dying}" in text.lower()


@pytest.mark.parametrize("dying", one_in(2, [0, 2]))
def test_killed_in_the_middle_of_an_all_reduce(dying: int) -> None:
    named(dying, 4, reduce_until, dying, signal.SIGKILL)


def test_a_hung_rank_is_named_within_the_timeout() -> None:
    named(1, 3, reduce_until, 1, signal.SIGSTOP, timeout=4)


def test_backward_raises_the_error_by_its_name() -> None:
    named(1, 3, backward_after_death, 1)


def test_a_death_is_named_where_gradients_are_float64() -> None:
    named(1, 2, double_backward_after_death, 1)


def test_a_rank_that_never_attaches_is_named() -> None:
    named(1, 2, attach_without_a_peer, timeout=3)


def test_states_of_two_steps_are_refused() -> None:
    reports = as_processes(2, states_of_two_steps)
    assert all(kind in ("CodecError", "TransportError") for kind, _, _ in reports), reports
    assert any("states of the same step" in text for _, _, text in reports), reports
