"""A process has one store, and maps each peer's store once, however many groups it is in."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import threading
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from ends import forked
from gradwire import groups
from gradwire.transport import shm_library, shm_store
from gradwire.transport.shm import Shm
from gradwire.transport.shm_store import STORES, Stores
from leftovers import until
from ranks import as_processes, at_once
from transport.shm_ends import compiled, ends, exchanged, linked, mapped, open_files, taken

SIZE = 1000  # so few that torch uses one thread, and works in a forked child


@pytest.fixture(autouse=True)
def _nothing_left() -> None:
    gc.collect()  # of earlier tests


def stores_mapped() -> list[int]:
    """How often each store is mapped."""
    return [times for name, times in mapped().items() if "gradwire-store" in name]


def exchange(lender: Shm, borrower: Shm, value: int) -> None:
    """Check that a message in the lender's store is read in place."""
    data, before = taken(lender, SIZE).fill_(value), lender.lent_bytes
    exchanged(lender, borrower, data)
    assert lender.lent_bytes == before + SIZE
    assert lender.store is not None
    lender.store.give(data)


def test_ranks_of_one_process_share_its_store() -> None:
    before = len(stores_mapped())
    with ends(3, stores=STORES) as made:
        assert stores_mapped()[before:] == [1]
        assert all(end.lenders == {0, 1, 2} - {end.rank} for end in made)
        for lender, borrower in permutations(made, 2):
            exchange(lender, borrower, 10 * lender.rank + borrower.rank)
    assert len(stores_mapped()) == before


def test_a_peer_s_store_is_mapped_once_and_while_a_group_uses_it() -> None:
    before = len(stores_mapped())
    processes = Stores(), Stores()

    def close(pair: list[Shm]) -> None:
        at_once(*(end.close for end in pair))

    pairs = [linked(2, 5.0, 1 << 12, processes) for _ in range(5)]
    assert stores_mapped()[before:] == [2, 2]  # by its own process, and by the other
    for value, (a, b) in enumerate(pairs):
        exchange(a, b, value)
        exchange(b, a, 100 + value)
    for pair in pairs[:4]:
        close(pair)
    assert stores_mapped()[before:] == [2, 2]
    exchange(*pairs[4], 7)
    close(pairs[4])
    assert len(stores_mapped()) == before
    again = linked(2, 5.0, 1 << 12, processes)  # after the last, a new one
    exchange(*again, 8)
    close(again)
    assert len(stores_mapped()) == before


def test_a_group_counts_what_it_has_taken_itself() -> None:
    process = Stores()
    a, b = (Shm(0, 2, [1], 5.0, 1 << 12, process) for _ in range(2))
    one, other = taken(a, 1 << 20), taken(b, 1 << 21)
    assert a.store is not None
    assert b.store is not None
    assert (a.store.used, b.store.used) == (1 << 20, 1 << 21)
    assert (a.shared_bytes, b.shared_bytes) == (a.nbytes + (1 << 20), b.nbytes + (1 << 21))
    b.store.give(one)  # which is another group's
    assert a.store.used == 1 << 20
    at = one.data_ptr(), other.data_ptr()
    assert at[0] + (1 << 20) <= at[1] or at[1] + (1 << 21) <= at[0]
    a.close()
    b.close()


def three() -> tuple[Shm, Shm, Shm]:
    """A lender, a borrower, and another group of the lender's process, so that its store stays."""
    process = Stores()
    other = Shm(0, 2, [1], 60.0, 1 << 12, process)
    lender, borrower = linked(2, 60.0, 1 << 12, [process, Stores()])
    return lender, borrower, other


def test_what_a_group_leaves_is_given_back_when_nothing_uses_it() -> None:
    lender, borrower, other = three()
    assert other.store is not None
    whole = other.store.whole
    forgotten, used = taken(lender, SIZE), taken(lender, SIZE)
    address = forgotten.data_ptr()
    del forgotten
    assert whole.used == 2 * mmap.PAGESIZE
    used.fill_(3)
    lender.close()
    assert whole.used == mmap.PAGESIZE
    assert bool((used == 3).all())
    again = taken(other, SIZE)
    assert again.data_ptr() == address
    other.store.give(again)
    part = used[10:20]
    del used
    assert whole.used == mmap.PAGESIZE
    del part
    assert whole.used == 0
    borrower.close()
    other.close()


def test_closing_waits_for_what_is_lent() -> None:
    """Long, as on a machine that is slow."""
    source = shm_library.source().replace("LINGER_NS = 200000000,", "LINGER_NS = 60000000000,")
    assert source != shm_library.source()
    with compiled(source, _LINGER_S=60.0):
        closes_while_a_peer_reads(in_time=True)


def test_memory_that_a_peer_reads_after_closing_stays_as_long_as_the_store() -> None:
    closes_while_a_peer_reads(in_time=False)


def closes_while_a_peer_reads(in_time: bool) -> None:
    lender, borrower, other = three()
    assert other.store is not None
    data = taken(lender, SIZE)
    loan = borrower.borrow(SIZE, 0, 7)
    sent = lender.isend(data.fill_(5), 1, 7)
    message = loan.wait()
    if in_time:
        threading.Timer(0.05, loan.give_back).start()
    lender.close()
    del data, sent, lender
    gc.collect()
    assert bool((message == (0 if in_time else 5)).all())
    assert other.store.whole.used == (0 if in_time else mmap.PAGESIZE)
    borrower.close()
    other.close()


def test_stores_take_a_quarter_of_a_limited_address_space(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where later groups have more peers than the first, which sized the store."""
    monkeypatch.setattr(shm_store, "space_for_stores", lambda: 1 << 26)
    process = Stores()
    first = Shm(0, 2, [1], 5.0, 1 << 12, process)
    assert first.store is not None
    assert first.store.whole.nbytes == 1 << 25
    caplog.clear()  # what is said of compiling
    larger = Shm(0, 3, [1, 2], 5.0, 1 << 12, process)
    peers = [Shm(r, 3, [p for p in range(3) if p != r], 5.0, 1 << 12, Stores()) for r in (1, 2)]
    with caplog.at_level(logging.WARNING):
        for peer in peers:
            larger.connect(peer.rank, peer.fd, os.pidfd_open(os.getpid()), peer.lends)
    assert larger.lenders == {1}
    assert [r.getMessage() for r in caplog.records] == [
        "rank 0: rank 2's messages are copied: the limit on address space is too low for its store"
    ]
    for end in (first, larger, *peers):
        end.close()


def test_a_file_that_could_shrink_is_no_store() -> None:
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 1 << 20)
    with ends(2) as (a, _), pytest.raises(OSError, match="could change its size"):
        Stores().of_peer(a.library, bytes(16), fd)
    os.close(fd)


def test_a_forked_child_has_nothing_of_the_store_but_may_have_its_own() -> None:
    with ends(2, stores=STORES) as (a, b):
        assert sum("memfd:gradwire-store" in name for name in open_files()) == 1

        def child() -> list[Any]:
            held = [*mapped(), *(name for name in open_files() if "gradwire-store" in name)]
            with ends(2, stores=STORES) as (c, d):
                exchange(c, d, 3)
            return [held, a.store is not None and a.store.take(10) is None, open_files()]

        held, refused, after = forked(child)
        assert held == []
        assert refused
        assert not [name for name in after if "gradwire-store" in name]
        exchange(a, b, 5)


# ---- processes -----------------------------------------------------------------------------------


def ours() -> list[str]:
    """gradwire's open files, and pidfds."""
    return sorted(f.split(" ")[0] for f in open_files() if "gradwire" in f or "pidfd" in f)


def reduce_in(group: dist.ProcessGroup) -> None:
    tensor = torch.ones(1_000_000)
    gw.all_reduce(tensor, "identity", group=group)
    assert bool((tensor == 2).all())
    assert groups.communicator(group).transport.lent_bytes


def destroy(group: dist.ProcessGroup) -> None:
    groups.release(group)
    dist.destroy_process_group(group)


def many_groups(rank: int) -> None:
    """Eight groups map each store once; after them, and after more that come and go, nothing is
    left."""
    watched, store = "anon_inode:[pidfd]", "/memfd:gradwire-store"
    made: list[dist.ProcessGroup] = []
    for count in range(1, 9):
        made.append(dist.new_group())
        reduce_in(made[-1])
        assert ours() == [store] + count * [watched]
    assert stores_mapped() == [1, 1]
    while made:
        destroy(made.pop())
    descriptors = 0
    for count in (0, 3, 14):
        for _ in range(count):
            group = dist.new_group()
            reduce_in(group)
            destroy(group)
            del group
        # A worker may be leaving its last task; collectives may have left cycles that hold views;
        # gloo closes a group's descriptors a little later.
        assert until(lambda: gc.collect() >= 0 and not mapped() and not ours())
        if count < 14:
            descriptors = len(open_files())
    assert until(lambda: len(open_files()) < descriptors + 10)


@pytest.mark.multiprocess
def test_groups_share_their_process_s_memory_and_leave_nothing() -> None:
    as_processes(2, many_groups)
