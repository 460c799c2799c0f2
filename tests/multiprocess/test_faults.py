"""A rank that dies or hangs is named by every survivor (law 10), wherever they wait for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scenario import FOUR, methods, model_of, passes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from ends import End, ended, ends, finished
from gradwire import groups
from gradwire.engine import Engine
from gradwire.planner.links import measure_links
from gradwire.transport import Mixed
from leftovers import until
from products import EXHAUSTIVE
from ranks import as_processes, caught
from rooms.decide import Decider
from rooms.handles import Switch, in_backward
from rooms.state import formats
from training import everywhere

pytestmark = pytest.mark.multiprocess

# A failure that only this timeout of the groups ends was not noticed: ranks hang by then.
TIMEOUT_S = 1800.0

# ---- what ranks of a group do until an error, in the place where one of them fails


class Failing:
    """The rank that fails where it calls this.

    Attributes:
        rank: of the job; peer: of the group.
        how: it does so.
    """

    def __init__(self, group: Any, rank: int, how: Callable[[], None]) -> None:
        self.rank, self.peer, self._how = rank, dist.get_group_rank(group, rank), how

    def __call__(self) -> None:
        if dist.get_rank() == self.rank:
            self._how()


def ddp_over(group: Any, module: nn.Module | None = None) -> DDP:
    return DDP(module or nn.Linear(100, 50), process_group=group)


def sharded_over(group: Any, module: nn.Module | None = None, **how: Any) -> Any:
    mesh = DeviceMesh.from_group(group, "cpu")
    return fully_shard(module or nn.Linear(64, 64), mesh=mesh, **how)


def reduces(group: Any, fails: Failing) -> None:
    """In the middle of an all-reduce."""
    tensor = torch.randn(1_000_000)
    gw.all_reduce(tensor, group=group)
    threading.Timer(0.5, fails).start()
    for step in range(1_000_000):
        gw.all_reduce(tensor, op="avg", step=step, group=group)


def reduces_in_order(group: Any, fails: Failing) -> None:
    """As over NCCL. The error stays."""
    groups.keeps_order = lambda asked, device: asked is group
    tensor = torch.randn(1_000_000)
    for step in range(3):
        gw.all_reduce(tensor, op="avg", group=group, step=step)
    fails()

    def forever() -> None:
        for step in range(1_000_000):
            gw.all_reduce(tensor, op="avg", group=group, step=step)

    error = caught(forever)
    assert caught(forever) is error
    assert error is not None
    raise error


def trains(group: Any, fails: Failing, double: bool = False, in_order: bool = False) -> None:
    """With float64, without compressed parameters."""
    if in_order:
        groups.keeps_order = lambda asked, device: asked is group
    dtype = torch.float64 if double else torch.float32
    model = ddp_over(group, nn.Sequential(nn.Linear(100, 50), nn.Linear(50, 10)).to(dtype))
    gw.attach(model)
    for _ in range(3):  # DDP itself communicates in the second, to rebuild its buckets
        model(torch.randn(4, 100, dtype=dtype)).sum().backward()
    fails()
    model(torch.randn(4, 100, dtype=dtype)).sum().backward()


def trains_over_the_backend(group: Any, fails: Failing, wrap: str) -> None:
    inner = nn.Sequential(nn.Linear(100, 500), nn.Linear(500, 100))
    if wrap == "registered":
        gw.register(inner)
    # FSDP2's weights stay unsharded after forward: the first failing collective is a gradient's.
    model = (
        sharded_over(group, inner, reshard_after_forward=False)
        if wrap == "fsdp2"
        else ddp_over(group, inner)
    )
    for _ in range(3):
        model(torch.randn(4, 100)).sum().backward()
    loss = model(torch.randn(4, 100)).sum()
    dist.barrier(group)
    fails()
    loss.backward()


def passes_through_the_backend(group: Any, fails: Failing) -> None:
    """The error is gloo's."""
    dist.barrier(group)
    fails()
    dist.all_reduce(torch.ones(100_000), group=group)


def receives_in_shared_memory(group: Any, fails: Failing) -> None:
    transport = Mixed(group)
    dist.barrier(group)
    threading.Timer(0.3, fails).start()  # others wait by now, or come later: both must do
    transport.irecv(torch.zeros(1, dtype=torch.uint8), fails.peer, 0).wait()


def gathers_weights(group: Any, fails: Failing, where: str, keep: str) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    for module in (*model, model):
        sharded_over(group, module, reshard_after_forward=True)
    handle: Any = gw.attach(model, weights="randomshift:bits=8", options=gw.Options(keep=keep))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    weights = handle._reductions.weights
    start = weights.start

    def start_and_fail(request: Any, *of: Any) -> Any:
        begun = start(request, *of)
        if request.verb == "all_gather" and in_backward() == (where == "backward"):
            fails()
        return begun

    for step in range(2):
        if step:
            weights.start = start_and_fail
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()


def decides(group: Any, fails: Failing, kind: str, where: type, method: str) -> None:
    """A plan, or prepares what was decided; the plan stays."""
    model = model_of(kind, group)
    once = gw.Replan(every=10_000, first=4, average=2, share=1.0, stale=None)
    handle: Any = gw.attach(model, FOUR, policy=once)
    uniform, known = methods(handle), getattr(where, method)

    def fails_there(*of: Any) -> Any:
        fails()
        return known(*of)

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(where, method, fails_there)
        try:
            passes(model, 0, 1_000_000)
        finally:
            assert methods(handle) == uniform
            assert handle.plan.version == 0


def attaches(group: Any, fails: Failing) -> None:
    model = ddp_over(group)
    fails()
    gw.attach(model)


def saves_a_full_state(group: Any, fails: Failing) -> None:
    handle = gw.attach(model := ddp_over(group))
    fails()
    handle.full_state_dict()
    del model


def gathers_states(group: Any, fails: Failing) -> None:
    """Once ranks have agreed to."""
    handle = gw.attach(model := ddp_over(group))
    exchange = formats._sent

    def fails_there(*of: Any) -> Any:
        fails()
        return exchange(*of)

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(formats, "_sent", fails_there)
        handle.full_state_dict()
    del model


def attaches_shards(group: Any, fails: Failing) -> None:
    """It asks first whether payloads of weights fit into memory."""
    module = sharded_over(group)
    gw.all_reduce(torch.ones(8), group=group)
    fails()
    gw.attach(module, weights="randomshift:bits=8")


def updates(group: Any, fails: Failing) -> None:
    handle = gw.attach(model := ddp_over(group))
    fails()
    handle.update(codec="qsgd", bits=8).wait()
    del model


def learns(group: Any, fails: Failing) -> None:
    """Nobody waits for the others, which have nothing to do until they have learned."""
    module = sharded_over(group, nn.Linear(400, 400, bias=False))
    handle = gw.attach(module, weights="learnedlevels")
    module(torch.ones(4, 400)).sum().backward()
    fails()
    handle.learn_levels(steps=1 << 40)


# ---- faults


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleeps() -> None:
    while True:
        time.sleep(60)


@dataclass(frozen=True)
class Fault:
    """Where a rank fails, how, and what the others' error says beside its rank."""

    where: Callable[[Any, Failing], None]
    how: Callable[[], None] = is_killed
    said: str = ""
    timeout: float = TIMEOUT_S
    backend: str | None = None


def backend(where: Callable[..., None]) -> Fault:
    return Fault(where, backend="gradwire")


AGREED = (saves_a_full_state, gathers_states, attaches_shards, updates, learns)
FEW: list[list[Fault]] = [
    [
        Fault(reduces),
        Fault(trains),
        Fault(partial(trains, double=True)),
        Fault(partial(trains, in_order=True)),
        Fault(reduces_in_order),
        backend(partial(trains_over_the_backend, wrap="ddp")),
        backend(partial(trains_over_the_backend, wrap="fsdp2")),
        backend(passes_through_the_backend),
        Fault(receives_in_shared_memory, said="its process has ended"),
    ],
    [
        *(Fault(where) for where in AGREED),
        Fault(partial(gathers_weights, where="forward", keep="reference")),
        Fault(partial(gathers_weights, where="backward", keep="none")),
        Fault(partial(decides, kind="ddp", where=Switch, method="_prepare")),
        Fault(reduces, is_stopped, timeout=4),
        Fault(attaches, sleeps, timeout=3),
    ],
]
MORE: list[Fault] = [
    *[Fault(reduces)] * 2,  # by its rank in the group
    backend(partial(trains_over_the_backend, wrap="registered")),
    Fault(partial(gathers_weights, where="forward", keep="payload")),
    *(
        Fault(partial(decides, kind=kind, where=Decider, method="_tables"))
        for kind in ("ddp", "fsdp2")
    ),
    Fault(reduces_in_order, is_stopped, timeout=8),
]


def each_fault(rank: int, faults: list[Fault]) -> list[End]:
    """Every fault in a group of its own, of two ranks that survive all, and one that fails: it is
    the first of its group in the first half of the faults, else the last."""
    half = len(faults) // 2
    survive = (half, half + 1)
    failing = [one for one in range(len(faults) + 2) if one not in survive]
    made = [
        dist.new_group(
            sorted([one, *survive]),
            timeout=timedelta(seconds=fault.timeout),
            backend=fault.backend,
        )
        for one, fault in zip(failing, faults, strict=True)
    ]
    store = dist.distributed_c10d._get_default_store().clone()
    found = []
    for one, fault, group in zip(failing, faults, made, strict=True):
        if rank in (one, *survive):
            store.set(f"{rank} comes to {one}", "")
            store.wait([f"{peer} comes to {one}" for peer in (one, *survive)])
            found.append(ended(partial(fault.where, group, Failing(group, one, fault.how))))
    return found


@pytest.mark.parametrize("faults", [*FEW, pytest.param(MORE, marks=EXHAUSTIVE)])
def test_who_fails_is_named(faults: list[Fault]) -> None:
    size, half = len(faults) + 2, len(faults) // 2
    failing = [one for one in range(size) if one not in (half, half + 1)]
    found = ends(size, each_fault, faults, timeout=TIMEOUT_S, unawaited=failing)
    survivors = [found[half], found[half + 1]]
    finished(survivors)
    for number, (fault, one) in enumerate(zip(faults, failing, strict=True)):
        for end in (survivor.value[number] for survivor in survivors):
            if fault.where is passes_through_the_backend:
                assert end.error in ("RuntimeError", "DistBackendError"), end
                continue
            assert (end.error, end.peer) == ("TransportError", 2 * (one > half)), (fault, end)
            # A transport knows ranks of its group alone.
            named = end.peer if fault.where is receives_in_shared_memory else one
            assert f"rank {named}" in end.text, (fault, end)
            assert fault.said in end.text, (fault, end)


def attaches_replicas(rank: int) -> End:
    """Rank 3 dies first; rank 0 shares no group with it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    module = fully_shard(nn.Linear(64, 64), mesh=mesh)
    for name in ("replicas", "shards"):
        gw.all_reduce(torch.ones(8), group=mesh[name].get_group())
    if rank == 3:
        is_killed()
    return ended(partial(gw.attach, module, weights="randomshift:bits=8"))


def test_a_death_is_named_in_other_groups() -> None:
    found = ends(4, attaches_replicas, timeout=1800, unawaited=(3,))
    finished(found[:3])
    for end, peer in zip(found[:3], (None, 1, 1), strict=True):
        assert (end.value.error, end.value.peer) == ("TransportError", peer), end
        assert "rank 3 has died" in end.value.text, end


# What waits for a rank that never comes: (it, whether it does by now).
Waiting = tuple[Callable[[], Any], Callable[[], object]]


def a_backward(group: Any, wrap: Callable[..., Any]) -> Waiting:
    module = wrap(group, nn.Linear(64, 64))
    handle = gw.attach(module)
    backward = module(torch.ones(4, 64)).sum().backward
    return backward, lambda kept=module: handle._reductions.owner.awaited_by


def a_gather(group: Any) -> Waiting:
    module = sharded_over(group)
    handle = gw.attach(module, weights="randomshift:bits=8")
    return partial(module, torch.ones(4, 64)), lambda: handle._reductions.weights.owner.awaited_by


def a_collective(group: Any) -> Waiting:
    reduce = partial(gw.all_reduce, torch.ones(8), group=group)
    return reduce, lambda: groups.communicator(group).calls.awaited_by


def an_agreement(group: Any) -> Waiting:
    module, member = ddp_over(group), groups.communicator(group).member
    return partial(gw.attach, module), lambda: member and member.part.open


def a_measurement(group: Any) -> Waiting:
    """In torch's C++: the transport is made by both ranks together."""
    comm = groups.communicator(group)
    made = comm._make
    begun = threading.Event()
    comm._make = lambda: begun.set() or made()
    return partial(measure_links, comm), begun.is_set


WAITS: list[Callable[[Any], Waiting]] = [
    partial(a_backward, wrap=ddp_over), partial(a_backward, wrap=sharded_over), a_gather,
    a_collective, an_agreement, a_measurement,
]  # fmt: skip


def test_a_late_rank_is_waited_for(rank: int) -> None:
    tensor = torch.full((1000,), float(rank))
    if rank == 1:
        time.sleep(1.5)  # longer than it takes until ranks look for what is wrong
    gw.all_reduce(tensor, "identity")
    assert tensor[0] == 1


def test_states_of_two_steps_are_refused(rank: int) -> None:
    """One rank resumes from an older checkpoint than the other."""
    model = ddp_over(dist.new_group())
    handle = gw.attach(model, "rotated")
    states = []
    for _ in range(2):
        model(torch.randn(4, 100)).sum().backward()
        states.append(handle.state_dict())
    handle.load_state_dict(states[rank])
    error = caught(lambda: model(torch.randn(4, 100)).sum().backward())
    assert isinstance(error, (gw.CodecError, gw.TransportError)), error
    assert any("states of the same step" in said for said in everywhere(str(error)))


def test_a_signal_interrupts_what_waits_for_a_peer(rank: int) -> None:
    """Rank 0 waits for rank 1, over a group for each way, and gets a SIGINT. The last of its
    processes, since their engines end."""
    store = dist.distributed_c10d._get_default_store().clone()
    found = []
    for ready in WAITS:
        wait, waits = ready(dist.new_group())
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
    assert rank == 1 or found == ["KeyboardInterrupt"] * len(WAITS)


def slow_once_then_another_dies(rank: int) -> End:
    """Rank 0 keeps its peers waiting, within the timeout; much later rank 2 dies."""
    tensor = torch.randn(100_000)
    gw.all_reduce(tensor)
    if rank == 0:
        time.sleep(6.8)
    for step in range(3):
        gw.all_reduce(tensor, step=step)
        time.sleep(1)  # time for the peers' notices about rank 0 to be withdrawn
    if rank == 2:
        is_killed()
    return ended(lambda: gw.all_reduce(tensor, step=5))


@pytest.mark.timing
def test_a_slow_rank_that_recovered_is_not_blamed() -> None:
    for end in as_processes(3, slow_once_then_another_dies, timeout=8, expect_death=(2,))[:2]:
        assert (end.error, end.peer) == ("TransportError", 2), end
