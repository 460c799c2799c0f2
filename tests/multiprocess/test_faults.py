"""A rank that dies or hangs in a collective is named by every survivor (law 10)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from ends import ends
from gradwire.engine import Engine
from gradwire.groups import communicator
from gradwire.planner.links import measure_links
from leftovers import until
from products import one_in
from ranks import as_processes, caught
from rooms.integrations import full_state

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


# What a rank that lives does with one that has died, over a group of the two.
Alone = Callable[[], Any]


def saves_a_full_state(mesh: DeviceMesh) -> Alone:
    return gw.attach(ddp_over(mesh)).full_state_dict


def gathers_states(mesh: DeviceMesh) -> Alone:
    """It dies once ranks have agreed to."""
    handle = gw.attach(ddp_over(mesh))
    if dist.get_rank() != 0:
        full_state._exchange = lambda *_: os._exit(1)
        handle.full_state_dict()
    return handle.full_state_dict


def attaches_shards(mesh: DeviceMesh) -> Alone:
    """It asks first whether payloads of weights fit into memory."""
    module = fully_shard(nn.Linear(64, 64), mesh=mesh)
    gw.all_reduce(torch.ones(8), group=mesh.get_group())
    return partial(gw.attach, module, weights="randomshift:bits=8")


def updates(mesh: DeviceMesh) -> Alone:
    module = ddp_over(mesh)
    handle = gw.attach(module)
    return lambda kept=module: handle.update(codec="qsgd", bits=8).wait()


def learns(mesh: DeviceMesh) -> Alone:
    """It does not wait for the other, which has nothing to do until it has learned."""
    module = fully_shard(nn.Linear(400, 400, bias=False), mesh=mesh)
    handle = gw.attach(module, weights="learnedlevels")
    module(torch.ones(4, 400)).sum().backward()
    return lambda: handle.learn_levels(steps=1 << 40)


DEATHS: list[Callable[[DeviceMesh], Alone]] = [
    saves_a_full_state, gathers_states, attaches_shards, updates, learns,
]  # fmt: skip


def ddp_over(mesh: DeviceMesh) -> DDP:
    return DDP(nn.Linear(100, 50), process_group=mesh.get_group())


def waits_for_the_dead(rank: int) -> list[Report]:
    """Rank 0 has a group with each other rank, which dies before it does what rank 0 does."""
    groups = [dist.new_group([0, peer]) for peer in range(1, dist.get_world_size())]
    found = []
    for peer, (group, prepare) in enumerate(zip(groups, DEATHS, strict=True), 1):
        if rank in (0, peer):
            act = prepare(DeviceMesh.from_group(group, "cpu"))
            if rank == peer:
                os._exit(1)
            found.append(reported(act))
    return found


def test_a_death_is_named_by_whoever_waits_for_an_agreement() -> None:
    """Not by the timeout, of half an hour."""
    others = range(1, len(DEATHS) + 1)
    found = ends(len(DEATHS) + 1, waits_for_the_dead, timeout=1800, unawaited=others)[0]
    assert found.error is None, found
    for death, report, rank in zip(DEATHS, found.value, others, strict=True):
        kind, peer, text = report
        assert (kind, peer) == ("TransportError", 1), (death.__name__, report)
        assert f"rank {rank} has died" in text or f"rank {rank} failed" in text, report


def attaches_replicas(rank: int) -> Report:
    """Rank 3 dies first; rank 0 shares no group with it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    module = fully_shard(nn.Linear(64, 64), mesh=mesh)
    for name in ("replicas", "shards"):
        gw.all_reduce(torch.ones(8), group=mesh[name].get_group())
    if rank == 3:
        os._exit(1)
    return reported(partial(gw.attach, module, weights="randomshift:bits=8"))


def test_a_death_is_named_in_other_groups() -> None:
    found = ends(4, attaches_replicas, timeout=1800, unawaited=(3,))
    for end, peer in zip(found[:3], (None, 1, 1), strict=True):
        assert end.error is None, end
        assert end.value[:2] == ("TransportError", peer), end
        assert "rank 3 has died" in end.value[2], end


# What waits for a rank that never comes: (it, whether it does by now).
Waiting = tuple[Callable[[], Any], Callable[[], object]]


def a_backward(mesh: DeviceMesh) -> Waiting:
    module = ddp_over(mesh)
    handle = gw.attach(module)
    backward = module(torch.ones(4, 100)).sum().backward
    return backward, lambda kept=module: handle._reductions.owner.awaited_by


def a_gather(mesh: DeviceMesh) -> Waiting:
    module = fully_shard(nn.Linear(64, 64), mesh=mesh)
    handle = gw.attach(module, weights="randomshift:bits=8")
    return partial(module, torch.ones(4, 64)), lambda: handle._reductions.weights.owner.awaited_by


def a_scatter(mesh: DeviceMesh) -> Waiting:
    module = fully_shard(nn.Linear(64, 64), mesh=mesh)
    handle = gw.attach(module)
    backward = module(torch.ones(4, 64)).sum().backward
    return backward, lambda kept=module: handle._reductions.owner.awaited_by


def a_collective(mesh: DeviceMesh) -> Waiting:
    group = mesh.get_group()
    reduce = partial(gw.all_reduce, torch.ones(8), group=group)
    return reduce, lambda: communicator(group).calls.awaited_by


def an_agreement(mesh: DeviceMesh) -> Waiting:
    module, member = ddp_over(mesh), communicator(mesh.get_group()).member
    return partial(gw.attach, module), lambda: member and member._open


def a_measurement(mesh: DeviceMesh) -> Waiting:
    """In torch's C++: the transport is made by both ranks together."""
    comm = communicator(mesh.get_group())
    made = comm._make
    begun = threading.Event()
    comm._make = lambda: begun.set() or made()
    return partial(measure_links, comm), begun.is_set


WAITS: list[Callable[[DeviceMesh], Waiting]] = [
    a_backward, a_gather, a_scatter, a_collective, an_agreement, a_measurement,
]  # fmt: skip


def is_interrupted(rank: int) -> list[str]:
    """Rank 0 waits for rank 1, over a group for each way, and gets a SIGINT."""
    store = dist.distributed_c10d._get_default_store().clone()
    found = []
    for ready in WAITS:
        wait, waits = ready(DeviceMesh.from_group(dist.new_group(), "cpu"))
        if rank == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)

            def interrupt(waits: Callable[[], object] = waits) -> None:
                until(waits)
                os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=interrupt, daemon=True).start()
            found.append(type(caught(wait)).__name__)
    if rank == 0:
        engine = Engine.current()
        for comm in list(engine.communicators):
            comm.close()
        assert engine.workers.finish(30), "the process would not end"
        store.set("interrupted", "")
    store.wait(["interrupted"])
    return found


def test_a_signal_interrupts_what_waits_for_a_peer() -> None:
    """Long before the timeout."""
    found = ends(2, is_interrupted, timeout=1800)
    assert all(end.error is None for end in found), found
    assert found[0].value == ["KeyboardInterrupt"] * len(WAITS)


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
