"""Several process groups: their order of use, their start and end, and their resources."""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from transports import over_both

import gradwire as gw
from ends import ends, finished
from gradwire import groups
from products import exhaustive
from ranks import at_once, caught, raises
from rooms.decide import scripts
from rooms.handles import switch
from stress.worlds import of_transport

pytestmark = [pytest.mark.multiprocess, *over_both(2)]


LIMIT = timedelta(seconds=60)


def test_a_fork_before_the_first_use_is_no_matter(rank: int) -> None:
    """A child of a process that has not used gradwire yet may."""
    child = os.fork()
    if child == 0:
        os._exit(0 if threading.active_count() else 1)
    os.waitpid(child, 0)
    gw.all_reduce(torch.ones(1000))


# ---- two groups in two orders


def test_two_groups_in_opposite_orders(rank: int) -> None:
    for cold in (True, False):
        a, b = dist.new_group(timeout=LIMIT), dist.new_group(timeout=LIMIT)
        if not cold:
            for group in (a, b):
                gw.all_reduce(torch.ones(10), "identity", group=group)
        for step in range(20):
            values = {a: torch.full((1000,), float(rank)), b: torch.full((3000,), float(rank))}
            futures = [
                gw.all_reduce(values[group], "identity", group=group, step=step, async_op=True)
                for group in ((a, b) if rank == 0 else (b, a))
            ]
            for future in futures:
                assert future is not None
                assert torch.equal(future.wait(), torch.full_like(future.value(), 1.0))


def test_threads_call_on_two_groups(rank: int) -> None:
    """Calls of two threads on two groups, each in order."""
    both = [dist.new_group(timeout=LIMIT) for _ in range(2)]
    size = 2

    def body(at: int) -> None:
        for step in range(30):
            values = torch.full((100 + 50 * at,), float(rank + step))
            gw.all_reduce(values, "identity", group=both[at], step=step)
            expected = size * step + size * (size - 1) / 2
            assert torch.equal(values, torch.full_like(values, expected))

    at_once(*(partial(body, at) for at in ((0, 1) if rank == 0 else (1, 0))))


def test_the_first_asynchronous_call_does_not_block(rank: int) -> None:
    group = dist.new_group(timeout=LIMIT)
    store = dist.distributed_c10d._get_default_store().clone()
    if rank == 1:  # it joins once rank 0's call has returned
        store.wait(["returned"])
    values = torch.full((1000,), float(rank))
    future = gw.all_reduce(values, "identity", group=group, async_op=True)
    if rank == 0:
        store.set("returned", b"")
    assert future is not None
    assert torch.equal(future.wait(), torch.full((1000,), 1.0))


# ---- groups that torch does not list


def test_a_group_made_by_hand_needs_no_default_group() -> None:
    assert not dist.is_initialized()
    values = torch.ones(10)
    gw.all_reduce(values, "identity", group=by_hand(0, 1, "alone", dist.HashStore()))
    assert torch.equal(values, torch.ones(10))


def test_a_group_whose_ranks_change_is_refused() -> None:
    kind = type("ProcessGroupGloo", (dist.ProcessGroup,), {"__module__": "torchft.process_group"})
    with pytest.raises(gw.ConfigError, match="ProcessGroupGloo is a process group of torchft"):
        gw.all_reduce(torch.ones(10), group=kind(0, 1))


def by_hand(rank: int, size: int, name: str, store: dist.Store | None = None) -> dist.ProcessGroup:
    """A group that is not in torch's table of groups, as frameworks make them."""
    store = dist.PrefixStore(name, store or dist.distributed_c10d._get_default_store())
    backend = c10d.ProcessGroupGloo(store, rank, size, timeout=LIMIT)
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def test_a_group_made_by_hand_lives_on(rank: int) -> None:
    groups = [by_hand(rank, 2, name) for name in ("one", "two")]
    for step in range(3):
        futures = []
        for group in (*groups, None):  # each call starts while the one before is in flight
            values = torch.full((200_000,), float(rank))
            futures.append(gw.all_reduce(values, "identity", group=group, step=step, async_op=True))
        for future in futures:
            assert future is not None
            assert torch.equal(future.wait(), torch.full((200_000,), 1.0))


def made_anew(rank: int, port: int) -> None:
    """Rank 0 has the store, which a destroyed group must not keep alive: the next group would read
    the old one's addresses there."""
    beside = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.barrier()  # else the peer may still connect its mesh: gloo's does so rank by rank
    dist.destroy_process_group()
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")
    for step in range(5):
        dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=30))
        values = torch.full((1000,), float(rank))
        gw.all_reduce(values, "identity", step=step)
        assert bool((values == 1.0).all())
        dist.barrier()
        dist.destroy_process_group()
        if rank == 0:
            beside.set(f"gone {step}", b"")
        beside.get(f"gone {step}")  # torch itself needs rank 0's old store to be gone


@pytest.mark.parametrize("shm", [True, *exhaustive(False)])
def test_a_default_group_made_anew_on_its_port(shm: bool) -> None:
    port = 20_000 + os.getpid() % 12_000  # below those that connections and port 0 get
    finished(ends(2, made_anew, port, timeout=60, environment=of_transport(shm)))


def test_whoever_asks_whether_a_group_lives_does_not_keep_it_alive() -> None:
    over, alive = threading.Event(), [lambda: True]

    def ask() -> None:
        while not over.is_set():
            alive[0]()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(100):
            group = dist.ProcessGroup(dist.HashStore(), 0, 1)
            held, alive[0] = weakref.ref(group), groups._make(group).alive
            time.sleep(0.0005)
            assert alive[0]()
            del group
            assert held() is None
            assert not alive[0]()
    finally:
        over.set()
        asking.join()


# ---- resources of groups

AFTER_IDLE_S = 8.0  # idle threads end after five seconds


def taken() -> dict[str, int]:
    """Threads (of all kinds), descriptors, MiB of address space and of shared memory, now."""
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    with open("/proc/self/smaps_rollup") as file:
        shared = next((line for line in file if line.startswith("Pss_Shmem")), "x: 0 kB")
    return {
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "address_mib": int(status["VmSize"].split()[0]) >> 10,
        "shared_mib": int(shared.split()[1]) >> 10,
    }


def settled(most: dict[str, int], patience: float = 2.0) -> dict[str, int]:
    """The resources in use, once they are at most `most`, or after a timeout."""
    end = time.monotonic() + patience
    while any(now > most[name] for name, now in taken().items()) and time.monotonic() < end:
        time.sleep(0.05)
    return taken()


def eight_groups(rank: int) -> dict[str, dict[str, int]]:
    """In addition to the resources of gloo's groups."""
    gw.all_reduce(torch.ones(1000))
    before = taken()
    groups = [dist.new_group(timeout=LIMIT) for _ in range(8)]
    for group in groups:
        dist.all_reduce(torch.ones(10), group=group)
    plain = taken()
    for group in groups:
        gw.all_reduce(torch.ones(1000), group=group)
    used = settled(plain)
    while groups:
        dist.destroy_process_group(groups.pop())
    del group  # gloo's threads go with the last reference
    gone = settled(before, AFTER_IDLE_S)
    return {"before": before, "plain": plain, "used": used, "gone": gone}


@pytest.mark.timing
def test_eight_groups_share_threads_and_address_space() -> None:
    found = ends(2, eight_groups)
    finished(found)
    for end in found:
        of = end.value
        more = {name: of["used"][name] - of["plain"][name] for name in of["used"]}
        assert more["threads"] <= 8, of
        assert more["address_mib"] < 64 << 10, of
        # Without another call, nothing of eight groups is left.
        assert of["gone"]["threads"] <= of["before"]["threads"] + 2, of
        assert of["gone"]["descriptors"] <= of["before"]["descriptors"] + 2, of
        assert of["gone"]["address_mib"] < of["before"]["address_mib"] + (4 << 10), of


def cycles(rank: int, count: int) -> list[dict[str, int]]:
    """Resources after cycles of gloo's groups alone, then of groups that gradwire used."""

    def cycle(used: bool) -> None:
        group = dist.new_group(timeout=LIMIT)
        values = torch.ones(100_000)
        dist.all_reduce(values, group=group)
        if used:
            gw.all_reduce(values, group=group)
        dist.destroy_process_group(group)

    found = []
    for used in (False, True):
        for _ in range(5):
            cycle(used)
        found.append(settled(taken(), 0.5))
        for _ in range(count):
            cycle(used)
        # gradwire's pool grew to the most threads that any cycle kept busy at once. Before the next
        # groups, patience stays well below their timeout: the other rank may need none.
        found.append(settled(found[-1], AFTER_IDLE_S if used else 2.0))
    return found


@pytest.mark.timing
@pytest.mark.parametrize("shm", [False, True], ids=["gloo", "shm"])
def test_groups_that_come_and_go_leave_nothing(shm: bool) -> None:
    count = 40
    found = ends(2, cycles, count, deadline=120, environment=of_transport(shm))
    finished(found)
    for end in found:
        plain_before, plain_after, before, after = end.value
        for name in ("threads", "descriptors", "address_mib", "shared_mib"):
            allowed = max(plain_after[name] - plain_before[name], 0)
            slack = {"address_mib": 512, "shared_mib": 8}.get(name, 4)
            assert after[name] - before[name] <= allowed + slack, (name, end.value)


# ---- forked children


def test_a_forked_child_is_refused(rank: int) -> None:
    """At once, and it may detach, though an update was pending in the parent."""
    gw.all_reduce(torch.ones(1000))
    model = DistributedDataParallel(torch.nn.Linear(40, 40))
    handle = gw.attach(model)
    if rank == 1:
        dist.barrier()
    update = handle.update(bits=3)  # of rank 0 alone, so it is not prepared
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        switch.CLOSING_S = scripts.CLOSING_S = 3600.0  # a wait that would end by itself
        said = [str(caught(lambda: gw.all_reduce(torch.ones(1000))))]
        said.append(str(caught(lambda: handle.update(bits=2))))
        handle.detach()
        os.write(sender, "\n".join([*said, f"{handle._reductions.installed}"]).encode())
        os._exit(0)
    ready, _, _ = select.select([receiver], [], [], 60)
    os.kill(child, 9)
    os.waitpid(child, 0)
    if rank == 0:
        dist.barrier()
    update.wait()  # the parent continues
    gw.all_reduce(torch.ones(1000), step=1)
    handle.detach()
    assert ready, "the child hangs"
    first, second, attached = os.read(receiver, 4096).decode().split("\n")
    assert attached == "False"
    assert all("this process was forked" in said and "spawn" in said for said in (first, second))


def begun_alone(rank: int) -> str:
    """Rank 0 begins an agreement, and gives up before rank 1 begins one."""
    store, comm = dist.distributed_c10d._get_default_store(), groups.communicator()
    if rank == 0:
        error = caught(lambda: comm.agree("the call of gw.attach", ["a"]))
        assert "rank 1 did not reach the call of gw.attach" in str(error)
        store.set("rank 0 gave up", "")
    store.wait(["rank 0 gave up"], timedelta(seconds=60))
    for what in ("the call of gw.attach", "something else"):
        error = raises(gw.TransportError, lambda w=what: comm.agree(w, ["a"]))
    return str(error)


def test_an_agreement_that_timed_out_breaks_the_group() -> None:
    found = ends(2, begun_alone, timeout=2.0)
    finished(found)
    assert all("rank 1 did not reach the call of gw.attach" in end.value for end in found)
