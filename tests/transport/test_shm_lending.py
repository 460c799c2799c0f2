"""Messages in a store are read in place, and their sends end once they have been given back."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import random
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from gradwire.errors import TransportError
from gradwire.transport import Pending, shm_store
from gradwire.transport.shm import Shm
from gradwire.transport.shm_store import Stores
from ranks import at_once, raises
from transport.shm_ends import (
    content,
    ends,
    exchanged,
    failing,
    forged,
    killable,
    nothing,
    taken,
)

SIZE = 300_000  # more than is worth lending
LOAN, LOANS = 1 << 63, 128  # as in shm_ring.c


def stored(end: Shm, size: int = SIZE, seed: int = 0) -> torch.Tensor:
    """A message in the store of a rank."""
    return taken(end, size).copy_(content((end.rank, 0, seed), 0, size))


@contextmanager
def waiting(pending: Pending) -> Iterator[threading.Thread]:
    """A thread that waits for an operation; on leaving it has ended."""
    thread = threading.Thread(target=pending.wait, daemon=True)
    thread.start()
    yield thread
    thread.join(60)
    assert not thread.is_alive()


def test_a_message_is_read_where_it_lies_until_it_is_given_back() -> None:
    with ends(2) as (a, b):
        data = stored(a)
        loan, sent = b.borrow(SIZE, 0, 7), a.isend(data, 1, 7)
        message = loan.wait()
        assert torch.equal(message, data)
        data[0] += 1
        assert message[0] == data[0]  # it is the same memory
        assert a.lent_bytes == SIZE
        with waiting(sent) as waits:
            waits.join(0.1)  # it goes on waiting
            assert waits.is_alive()
            loan.give_back()
        exchanged(a, b, data, in_use=100)
        assert a.lent_bytes == SIZE + 100
        for beside in (nothing(SIZE), content((0, 1, 0), 0, SIZE)):
            loan, sent = b.borrow(SIZE, 0, 7), a.isend(beside, 1, 7)
            message = loan.wait()
            sent.wait()  # it is copied
            loan.give_back()
            assert torch.equal(message, beside)  # a copy is its reader's own
        assert a.lent_bytes == SIZE + 100


def test_a_receive_with_memory_copies_large_messages_from_the_store() -> None:
    for size, lent in ((SIZE, SIZE), (100, 0), (0, 0)):
        with ends(2) as (a, b):
            data, inbox = stored(a, size), nothing(size)
            coming = b.irecv(inbox, 0, 7)
            sent = a.isend(data, 1, 7)
            coming.wait()
            sent.wait()
            assert torch.equal(inbox, data)
            assert a.lent_bytes == lent


def test_many_loans_of_one_tag_are_given_back_in_any_order() -> None:
    """More loans than a link has: the rest is copied."""
    count = 500
    with ends(2) as (a, b):
        data = [stored(a, 1000, seed) for seed in range(count)]
        loans = [b.borrow(1000, 0, 7) for _ in range(count)]
        sends = [a.isend(each, 1, 7) for each in data]

        assert a.lent_bytes == LOANS * 1000
        found: list[torch.Tensor] = []
        at_once(
            lambda: [sent.wait() for sent in sends[LOANS:]],
            lambda: found.extend(loan.wait() for loan in loans),
        )
        assert all(map(torch.equal, found, data))
        random.Random(1).shuffle(loans)
        for loan in loans:
            loan.give_back()
        for sent in sends[:LOANS]:
            sent.wait()
        b.borrow(SIZE, 0, 8)
        a.isend(stored(a), 1, 8)
        assert a.lent_bytes == LOANS * 1000 + SIZE  # there is room again


# ---- the store ----------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[Shm]:
    """A rank that has not passed its segment to peers."""
    end = Shm(0, 2, [1], 5.0, 1 << 12, Stores())
    yield end
    end.close()


def test_memory_is_taken_first_fit_and_given_back(alone: Shm) -> None:
    store = alone.store
    assert store is not None
    fd = store.whole.fd
    before = os.fstat(fd).st_blocks
    held = [taken(alone, 1 << 20) for _ in range(3)]
    addresses = [memory.data_ptr() for memory in held]
    assert all(address % mmap.PAGESIZE == 0 for address in addresses)
    assert store.used == 3 << 20
    assert alone.shared_bytes == alone.nbytes + (3 << 20)
    assert os.fstat(fd).st_blocks - before == (3 << 20) // 512
    store.give(held[1].fill_(1))
    assert os.fstat(fd).st_blocks - before == (2 << 20) // 512
    again = taken(alone, 1 << 19)
    assert again.data_ptr() == addresses[1]
    assert not again.any()
    store.give(torch.zeros(10))  # not from the store
    assert store.used == (2 << 20) + (1 << 19)


def test_a_forked_child_leaves_the_store_alone(alone: Shm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child may have mapped other memory at the store's address."""
    store = alone.store
    assert store is not None
    memory = taken(alone, 1 << 20).fill_(7)
    parent = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: parent + 1)
        store.give(memory)
        assert store.take(10) is None
    assert bool((memory == 7).all())
    assert store.used == 1 << 20


def test_a_full_store_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shm_store, "room", lambda *_: 1 << 20)
    with ends(2) as (a, b), caplog.at_level(logging.WARNING):
        data = stored(a, 1 << 19)
        assert a.store is not None
        assert a.store.take(1 << 20) is None
        assert a.store.take(1 << 20) is None
        assert caplog.text.count("is full") == 1
        exchanged(a, b, data)


def test_memory_that_cannot_be_had_is_not_taken(
    alone: Shm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = alone.store
    assert store is not None
    refusing = SimpleNamespace(shm_fill=lambda *_: errno.ENOMEM, shm_empty=lambda *_: None)
    monkeypatch.setattr(store.whole, "_library", refusing)
    with caplog.at_level(logging.WARNING):
        assert store.take(SIZE) is None
    assert "Cannot allocate memory" in caplog.text
    assert store.used == 0


@pytest.mark.parametrize("which", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_limits_leave_no_room(
    which: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {getattr(resource, which): 1 << 22}
    none = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits.get(kind, none), none))
    with caplog.at_level(logging.WARNING), ends(2) as (a, b):
        assert a.store is None
        assert "limits" in caplog.text
        assert a.lenders == frozenset()
        data, inbox = content((0, 1, 0), 0, SIZE), nothing(SIZE)
        coming = b.irecv(inbox, 0, 7)
        a.isend(data, 1, 7).wait()
        coming.wait()
        assert torch.equal(inbox, data)


def test_one_rank_may_lend_and_the_other_not(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = iter([0, 1 << 24])
    monkeypatch.setattr(shm_store, "room", lambda *_: next(rooms))
    with ends(2) as (a, b):
        assert (a.lenders, b.lenders) == ({1}, set())
        exchanged(b, a, stored(b))


# ---- failures -----------------------------------------------------------------------------------


def test_a_borrower_that_is_killed_ends_the_send() -> None:
    with killable() as (lender, borrower, process):
        loan, sent = borrower.borrow(SIZE, 0, 7), lender.isend(stored(lender), 1, 7)
        loan.wait()
        threading.Timer(0.2, process.kill).start()
        assert raises(TransportError, sent.wait, "its process has ended").peer == 1


def test_what_a_killed_lender_has_lent_stays() -> None:
    with killable() as (borrower, lender, process):
        data = stored(lender)
        loans = [borrower.borrow(SIZE, 1, tag) for tag in range(2)]
        lender.isend(data, 0, 0)
        process.kill()
        process.wait()
        message = loans[0].wait()
        lender.close()
        assert torch.equal(message, data)
        loans[0].give_back()
        with pytest.raises(TransportError, match=r"its process has ended|has destroyed") as caught:
            loans[1].wait()
        assert caught.value.peer == 1


def test_a_message_outlives_both_ends() -> None:
    with ends(2) as (a, b):
        expected = content((0, 0, 0), 0, SIZE)
        loan = b.borrow(SIZE, 0, 7)
        a.isend(stored(a), 1, 7)
        message = loan.wait()
    del a
    loan.give_back()  # without effect
    assert torch.equal(message, expected)


def test_a_send_whose_loan_is_never_given_back_ends() -> None:
    with ends(2, timeout=0.3) as (a, b):
        loan, sent = b.borrow(SIZE, 0, 7), a.isend(stored(a), 1, 7)
        loan.wait()
        raises(TransportError, sent.wait, "within the timeout")


@pytest.mark.parametrize("borrows", [True, False])
def test_a_loan_out_of_the_store_or_that_nobody_asked_for_is_refused(borrows: bool) -> None:
    """The peer writes a frame into the ring: its tag, its size, and a loan's offset and number."""
    room = shm_store.room(1)
    # behind and across the end, before the start
    frames = [(SIZE | LOAN, offset % (1 << 64), 0) for offset in (room, room - SIZE + 1, -1)]
    for frame in frames if borrows else [(100 | LOAN, 0, 0)]:
        with forged() as (end, write):
            coming = end.borrow(SIZE, 1, 7) if borrows else end.irecv(nothing(100), 1, 7)
            write(0, 8192, 7, *frame)
            write(0, 4096, 32)  # bytes written
            error = failing(coming.wait)
            assert error.peer == 1
            assert "invalid data" in str(error)


def test_a_loan_that_was_never_made_cannot_be_given_back() -> None:
    with forged() as (lender, write):
        write(1, 4096 + 256, 1)  # loans given back, of what rank 0 sends
        raises(TransportError, lender.isend(stored(lender), 1, 7).wait, "invalid data")
