"""Replicas that are lost, wherever, and that join: those that go on end a meeting alike, and have
the weights of the loop in float64."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from replicas import net, reference, sgd, train, weights_of
from test_outer import NAMES, close, of_several
from torch.distributed.device_mesh import init_device_mesh

import gradwire as gw
from ranks import as_processes, caught, on, refuses
from rooms.outer_loop import Fragment, OuterMeeting, OuterSteps, Replica, fragment, fragments_of

pytestmark = pytest.mark.multiprocess

HOW = {"every": 4, "fragments": 2, "lr": 0.8, "momentum": 0.3}
PARTS = fragments_of(NAMES, 4, 2)
LOST = 10  # the step after which a replica is lost: in the fifth meeting

# where rank 2 ends its process, and how many replicas that meeting is of in the end
WHERE = {
    "before it encodes": (Fragment, "differences", (2,)),
    "as it tells that it has all": (OuterMeeting, "_told", (3,)),
    "amid the meeting": (OuterSteps, "settle", (2, 3)),
    "before it applies": (Fragment, "step", (3,)),
}


def again(folder: str, rank: int, ranks: int) -> None:
    """The default process group anew, of those that are left."""
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/{ranks}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def rest_of(model: Any, optimizer: Any, outer: Any, rank: int, last: int) -> None:
    """Train on to a step; the one that has just failed is not taken again."""
    train(model, optimizer, rank, range(outer.stats()["optimizer_steps"], last))


def loses(rank: int, folder: str, where: str) -> Any:
    model = net()
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, codec="none", **HOW)
    train(model, optimizer, rank, range(LOST - 1))
    if rank == 2:
        kind, name, _ = WHERE[where]
        setattr(kind, name, lambda *_: os._exit(1))
    error = caught(lambda: train(model, optimizer, rank, range(LOST - 1, 40)))
    assert isinstance(error, gw.TransportError), error
    assert error.peer == 2
    failed = outer.stats()["optimizer_steps"]
    assert outer._reductions.met == (4 if failed == LOST else 5)  # nothing of it is applied
    again(folder, rank, 2)
    outer.recover()
    assert outer.history()[-1]["line"].startswith("3 replicas before, 2 now, of which 0 began anew")
    rest_of(model, optimizer, outer, rank, 20)
    assert outer.stats()["rounds"] == 5
    return weights_of(model), outer.outer_weights(), outer.history()[-1]["line"]


@pytest.mark.parametrize("where", WHERE)
def test_a_replica_is_lost_and_the_others_go_on(tmp_path: Path, where: str) -> None:
    found = as_processes(3, loses, str(tmp_path), where, expect_death=(2,))[:2]
    if where == "before it encodes":
        assert found[0][2].endswith("a meeting was held again")
    assert any(are_of(found, of) for of in WHERE[where][2])


def loses_one_of_several(rank: int, kind: str, where: str) -> Any:
    """Rank 5 is lost, of the last of three replicas of two ranks."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("replicas", "ranks"))
    model = of_several(kind, mesh["ranks"])
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, codec="none", group=mesh["replicas"], **HOW)
    train(model, optimizer, rank // 2, range(LOST - 1))
    if rank == 5:
        owner, name, _ = WHERE[where]
        setattr(owner, name, lambda *_: os._exit(1))
    error = caught(lambda: train(model, optimizer, rank // 2, range(LOST - 1, 40)))
    if rank == 4:  # without the other the replica cannot train
        os._exit(1)
    assert isinstance(error, gw.TransportError), error
    assert "rank 5" in str(error) or "rank 4" in str(error)
    outer.recover(dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True))
    for step in range(outer.stats()["optimizer_steps"], 20):
        train(model, optimizer, rank // 2, range(step, step + 1))
    whole = {n.removeprefix("module."): p for n, p in model.named_parameters()}
    return {n: (p.full_tensor() if kind == "fsdp2" else p).detach() for n, p in whole.items()}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("where", ["amid the meeting", "before it applies"])
def test_a_rank_of_a_replica_is_lost_and_other_replicas_go_on(kind: str, where: str) -> None:
    found = as_processes(6, loses_one_of_several, kind, where, expect_death=(4, 5))[:4]
    ends = [
        loop(lambda step, of=of: 3 if step < LOST else of if step == LOST else 2)[0]
        for of in (2, 3)
    ]
    assert any(
        not any(caught(lambda w=w, r=r, e=e: close(w, e[r // 2])) for r, w in enumerate(found))
        for e in ends
    )


def shares_rows(rank: int) -> None:
    """Rank 3 is lost as the ranks of its replica give each other the rows that have changed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ranks"))
    model = of_several("ddp", mesh["ranks"])
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, codec="none", group=mesh["replicas"], **HOW)
    if rank == 3:
        Replica.spread = lambda *_: os._exit(1)  # type: ignore[method-assign]
    error = caught(lambda: train(model, optimizer, rank // 2, range(4)))
    assert isinstance(error, gw.TransportError), error
    met = outer.stats()["optimizer_steps"] // 2
    if rank == 2:
        assert "a rank of this replica, ranks [2, 3], died or hangs as rows were" in str(error)
    assert met == (1 if rank == 2 else 2)  # the other replica has that meeting, and no next one


def test_a_rank_is_lost_as_a_replica_shares_rows() -> None:
    as_processes(4, shares_rows, expect_death=(3,))


def are_of(found: Any, meet: int) -> bool:
    """Whether these are the weights of a loop in which so many replicas have met the last time."""
    replicas, theta = loop(lambda step: 3 if step < LOST else meet if step == LOST else 2)
    own = [
        caught(lambda own=own, w=w: close(own, w))
        for (own, *_), w in zip(found, replicas, strict=False)
    ]
    outer = [caught(lambda kept=kept: close(kept, theta)) for _, kept, _ in found]
    return not any([*own, *outer])


def loop(present: Callable[[int], int]) -> Any:
    how = {name: of for name, of in HOW.items() if name != "fragments"}
    return reference(3, 20, PARTS, present=present, **how)


def does_not_hear(rank: int, folder: str) -> Any:
    """Rank 2 is lost once all have told that they can apply, and rank 1 has not heard it."""
    model = net()
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, codec="none", **HOW)
    train(model, optimizer, rank, range(LOST - 1))
    if rank == 2:
        Fragment.step = lambda *_: os._exit(1)  # type: ignore[method-assign]
    commit = OuterMeeting.commit

    def hears(*of: Any) -> None:
        commit(*of)
        raise gw.TransportError("lost")

    if rank == 1:
        OuterMeeting.commit = hears  # type: ignore[method-assign]
    error = caught(lambda: train(model, optimizer, rank, range(LOST - 1, 40)))
    assert isinstance(error, gw.TransportError), error
    assert outer._reductions.prepared == (rank == 1)
    assert outer._reductions.met == (5 if rank == 0 else 4)
    assert outer._reductions.missed == (0 if rank == 0 else None)  # it has gone on, to the next
    OuterMeeting.commit = commit  # type: ignore[method-assign]
    again(folder, rank, 2)
    outer.recover()
    line = outer.history()[-1]["line"]
    assert "of which 0 began anew; a meeting was applied by all; a meeting was held again" in line
    assert outer._reductions.met == 6
    rest_of(model, optimizer, outer, rank, 20)
    return outer.outer_weights()


def test_one_that_has_not_heard_applies_what_another_has_applied(tmp_path: Path) -> None:
    found = as_processes(3, does_not_hear, str(tmp_path), expect_death=(2,))[:2]
    for name, values in found[0].items():
        assert torch.equal(values, found[1][name])


def is_late(rank: int, folder: str) -> Any:
    """Rank 2 comes to a meeting when the others have waited for it in vain."""
    store = dist.distributed_c10d._get_default_store().clone()
    model = net()
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, codec="none", **HOW)
    train(model, optimizer, rank, range(3))
    theta = outer.outer_weights()
    if rank == 2:
        store.wait(["rank 0 has given up", "rank 1 has given up"], timedelta(seconds=100))
    error = caught(lambda: train(model, optimizer, rank, range(3, 4)))
    assert isinstance(error, gw.TransportError), error
    if rank < 2:
        assert error.peer == 2
        store.set(f"rank {rank} has given up", "")
    for name, values in outer.outer_weights().items():
        assert torch.equal(values, theta[name])
    again(folder, rank, 3)
    outer.recover()
    assert outer.history()[-1]["line"].endswith("a meeting was held again")
    rest_of(model, optimizer, outer, rank, 16)
    return weights_of(model), outer.outer_weights()


def test_one_that_is_late_is_named_and_goes_on_with_the_others(tmp_path: Path) -> None:
    found = as_processes(3, is_late, str(tmp_path), timeout=8)
    how = {name: of for name, of in HOW.items() if name != "fragments"}
    replicas, theta = reference(3, 16, PARTS, **how)
    for (own, outer), expected in zip(found, replicas, strict=True):
        close(own, expected)
        close(outer, theta)


def loses_another(rank: int, folder: str) -> Any:
    """Rank 2 is lost before it encodes, and rank 1 in the meeting that is held again."""
    model = net()
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, codec="none", **HOW)
    train(model, optimizer, rank, range(LOST - 1))
    if rank == 2:
        Fragment.differences = lambda *_: os._exit(1)  # type: ignore[method-assign]
    error = caught(lambda: train(model, optimizer, rank, range(LOST - 1, 40)))
    assert isinstance(error, gw.TransportError), error
    again(folder, rank, 2)
    if rank == 1:
        OuterSteps.meet = lambda *_: os._exit(1)  # type: ignore[method-assign]
    error = caught(outer.recover)
    assert isinstance(error, gw.TransportError), error
    again(folder, rank, 1)
    outer.recover()
    rest_of(model, optimizer, outer, rank, 20)
    return outer.stats()["optimizer_steps"], outer._reductions.met, weights_of(model)


def test_another_is_lost_as_the_rest_recover(tmp_path: Path) -> None:
    found = as_processes(3, loses_another, str(tmp_path), expect_death=(1, 2))[0]
    replicas, _ = loop(lambda step: 3 if step < LOST else 1)
    assert found[:2] == (20, 10)
    close(found[2], replicas[0])


@on(2)
def test_an_interrupt_of_a_rank_that_has_told_is_recovered_from(rank: int) -> None:
    model = net()
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, codec="none", **HOW)
    commit = OuterMeeting.commit

    def interrupted(meeting: OuterMeeting, *of: Any) -> None:
        commit(meeting, *of)
        raise KeyboardInterrupt

    train(model, optimizer, rank, range(3))
    if rank:
        OuterMeeting.commit = interrupted  # type: ignore[method-assign]
    error = caught(lambda: train(model, optimizer, rank, range(3, 4)))
    assert isinstance(error, KeyboardInterrupt) == bool(rank)
    OuterMeeting.commit = commit  # type: ignore[method-assign]
    error = caught(lambda: train(model, optimizer, rank, range(4, 16)))
    assert isinstance(error, gw.TransportError), error
    outer.recover()
    rest_of(model, optimizer, outer, rank, 16)
    assert len({*told(outer._reductions.fingerprint())}) == 1


@on((1, 2))
def test_an_outer_step_that_is_interrupted_goes_on(rank: int) -> None:
    """By what comes next, such as a state that is saved."""
    model, steps = net(), 16
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, codec="none", **HOW)
    real, calls = fragment.Kept, []

    def interrupted(*of: Any) -> Any:
        calls.append(of)
        if len(calls) in (2, 40):  # amid two meetings
            raise KeyboardInterrupt
        return real(*of)

    fragment.Kept = interrupted  # type: ignore[assignment,misc]
    try:
        for step in range(steps):
            error = caught(lambda step=step: train(model, optimizer, rank, range(step, step + 1)))
            if isinstance(error, KeyboardInterrupt):
                met = outer._reductions.met
                assert outer.state_dict()["outer"]["met"] == met + 1
    finally:
        fragment.Kept = real  # type: ignore[misc]
    assert len(calls) == 12 * 4 + 2
    how = {name: of for name, of in HOW.items() if name != "fragments"}
    _, theta = reference(dist.get_world_size(), steps, PARTS, **how)
    close(outer.outer_weights(), theta)
    assert len({*told(outer._reductions.fingerprint())}) == 1


@on(2)
def test_a_thread_saves_while_another_takes_steps(rank: int) -> None:
    """As background checkpoints do, of a meeting that is under way."""
    model = net()
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, codec="none", **HOW, delay=1)
    ended = threading.Event()

    def saves() -> None:
        while not ended.is_set():
            outer.state_dict()

    with ThreadPoolExecutor() as pool:
        saving = pool.submit(saves)
        try:
            train(model, optimizer, rank, range(41))  # no meeting is under way then
        finally:
            ended.set()
        saving.result()
    assert outer.stats()["rounds"] == 10
    assert len({*told(outer._reductions.fingerprint())}) == 1


@on(3)
def test_one_that_is_left_behind_is_told(rank: int) -> None:
    """Ranks 0 and 1 go on without rank 2, which waits for them in a meeting."""
    store = dist.distributed_c10d._get_default_store().clone()
    model = net()
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, codec="none", **HOW)
    two = dist.new_group([0, 1])
    train(model, optimizer, rank, range(3))
    if rank < 2:
        outer.recover(two)
        store.set(f"left {rank}", "")
        store.wait(["came"])
        return
    store.wait(["left 0", "left 1"])
    error = caught(lambda: train(model, optimizer, rank, range(3, 4)))
    assert isinstance(error, gw.TransportError), error
    assert "goes on in another group" in str(error)
    store.set("came", "")


@on(3, "none", "qsgd:bits=4", "powersgd:rank=2", "sparseloco")
def test_a_replica_joins(rank: int, codec: str) -> None:
    """Two replicas train; a third begins at their outer weights, and all meet from then on."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    model = net(seed=rank)
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, codec=codec, group=groups[rank == 2], **HOW)
    if rank < 2:
        train(model, optimizer, rank, range(7))
        outer.lr = 0.5
    theta, own = outer.outer_weights(), weights_of(model)
    residuals = {n: m.state["residual"].clone() for n, m in outer._members.items() if m.state}
    outer.recover()
    line = outer.history()[-1]["line"]
    assert line == f"{1 if rank == 2 else 2} replicas before, 3 now, of which 1 began anew"
    assert (outer.lr, outer.rank, outer.world_size) == (0.5, rank, 3)
    assert outer.stats()["optimizer_steps"] == 7
    for name, values in outer.outer_weights().items():
        dist.broadcast(theta[name], 0)
        assert torch.equal(values, theta[name])
        expected = values if rank == 2 else own[name]
        assert torch.equal(model.get_parameter(name).detach(), expected)
    # What all ranks have alike begins anew.
    states = [{*m.state} - {"residual", "owed"} for m in outer._members.values()]
    assert not any(told(any(states)))
    for name, kept in residuals.items():
        if rank < 2:
            assert torch.equal(outer._members[name].state["residual"], kept)
    train(model, optimizer, rank, range(7, 16))
    assert len({*told(outer._reductions.fingerprint())}) == 1
    assert outer.stats()["rounds"] == 4


@on(3, ("bf16", "qsgd:bits=4"), ("none", "qsgd:bits=4"), ("qsgd:bits=4", "none"))
def test_one_joins_after_an_update_with_what_is_in_force(rank: int, first: str, then: str) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    model = net(seed=rank)
    optimizer = sgd(model)
    codec = then if rank == 2 else first
    outer = gw.outer(model, optimizer, codec=codec, group=groups[rank == 2], **HOW)
    if rank < 2:
        outer.update(then)
        train(model, optimizer, rank, range(11))
        assert outer.plan.version == 1
    outer.recover()
    train(model, optimizer, rank, range(11, 16))
    assert len({*told(outer._reductions.fingerprint())}) == 1


@on(2)
def test_a_meeting_that_was_held_after_all_is_not_held_again(rank: int) -> None:
    model = net()
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, codec="none", **HOW)
    outer.lr = 0.5 + rank / 4
    refuses("in lr", lambda: train(model, optimizer, rank, range(2)))
    outer.lr = 0.5
    train(model, optimizer, rank, range(2, 7))
    assert outer._reductions.missed is None  # the fragment has met since
    outer.recover()
    assert outer._reductions.met == 2
    assert "again" not in outer.history()[-1]["line"]
    assert outer.history()[-1]["step"] == 7
    outer.detach()
    refuses("this handle was detached: call gw.outer again", outer.recover)


@on(3)
def test_the_largest_group_is_followed_and_a_refused_call_changes_nothing(rank: int) -> None:
    """The one that joins has met more often than the others."""
    alone = [dist.new_group([0, 1]), dist.new_group([2])][rank == 2]
    model = net(seed=rank)
    optimizer = sgd(model)
    how = {**HOW, "codec": "none", "group": alone}
    outer = gw.outer(model, optimizer, **{**how, "every": 8})
    outer.lr = 0.3 if rank == 2 else 0.7
    train(model, optimizer, rank, range(16 if rank == 2 else 4))
    other = net(seed=rank)
    unlike = gw.outer(other, sgd(other), **{**how, "every": 4 if rank == 2 else 8})
    before = unlike.outer_weights(), weights_of(other), unlike.lr
    refuses("ranks disagree on the call of gw.outer", unlike.recover)
    after = unlike.outer_weights(), weights_of(other), unlike.lr
    assert after[2] == before[2]
    for name in before[0]:
        assert torch.equal(after[0][name], before[0][name])
        assert torch.equal(after[1][name], before[1][name])
    theta = outer.outer_weights()
    outer.recover()
    assert outer.lr == 0.7
    assert outer.stats()["optimizer_steps"] == 4
    for name, values in outer.outer_weights().items():
        dist.broadcast(theta[name], 0)
        assert torch.equal(values, theta[name])


@on(4, "ddp", "fsdp2")
def test_a_replica_of_several_ranks_joins(rank: int, kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ranks"))
    alone = [dist.new_group([one]) for one in range(4)][rank]
    replica = rank // 2
    model = of_several(kind, mesh["ranks"], seed=replica)
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, codec="qsgd:bits=4", group=alone, **HOW)
    train(model, optimizer, replica, range(6 if replica == 0 else 1))
    theta = outer.outer_weights()
    outer.recover(mesh["replicas"])
    between = mesh["replicas"].get_group()
    for name, values in outer.outer_weights().items():
        dist.broadcast(theta[name], rank % 2, group=between)
        assert torch.equal(values, theta[name])
    whole = [p.full_tensor() if kind == "fsdp2" else p for p in model.parameters()]
    sums = told(float(torch.cat([p.detach().flatten() for p in whole]).double().sum()))
    assert sums[0] == sums[1]
    assert sums[2] == sums[3]
    train(model, optimizer, replica, range(6, 16))
    numbers = told(outer._reductions.fingerprint())
    assert numbers[:2] == numbers[2:]


def told(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
