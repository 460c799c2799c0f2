"""Shared memory: many messages, large ones, and threads that sleep and are woken in time; last
sends go out, forged bytes are noticed, and nothing is left."""

from __future__ import annotations

import gc
import os
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import pytest
import torch

from gradwire.transport import Pending, shm, shm_library
from gradwire.transport.shm import Shm, ring_bytes_for
from products import EXHAUSTIVE
from ranks import at_once
from transport.shm_ends import (
    compiled,
    content,
    ends,
    failing,
    forged,
    mapped,
    nothing,
    open_files,
    taken,
)

RING = 1 << 12  # so that most messages are larger


def test_receives_may_be_posted_long_after_and_in_reverse() -> None:
    """More receives than a ring has announcements, and more bytes than a ring."""
    with ends(2, ring_bytes=RING) as (a, b):
        count = 500
        sent = [content((0, 1, tag), 0, 100) for tag in range(count)]
        sends = [a.isend(data, 1, tag) for tag, data in enumerate(sent)]
        got = [nothing(100) for _ in range(count)]
        receives = [b.irecv(got[tag], 0, tag) for tag in reversed(range(count))]
        at_once(lambda: [each.wait() for each in sends], lambda: [each.wait() for each in receives])
        assert all(torch.equal(x, y) for x, y in zip(sent, got, strict=True))


def test_a_message_of_many_rings_each_way_at_once() -> None:
    """With receives posted before or after the sends, and both directions waited for by threads."""
    data = [content((r, 1 - r, 0), 0, 7_000_001) for r in range(2)]

    def swap(end: Shm, early: bool) -> torch.Tensor:
        inbox = torch.zeros_like(data[0])
        coming = end.irecv(inbox, 1 - end.rank, 3) if early else None
        sent = end.isend(data[end.rank], 1 - end.rank, 3)
        coming = coming or end.irecv(inbox, 1 - end.rank, 3)
        at_once(sent.wait, coming.wait)
        return inbox

    for early in (True, False):
        with ends(2) as made:
            got = at_once(*(partial(swap, end, early) for end in made))
        assert all(map(torch.equal, got, data[::-1]))


SLICE_S = 15.0  # much longer than a slow machine keeps a thread that is awake from its core


@pytest.fixture(params=[7, 15], ids=["flags", "pieces"])  # where: see shm_ring.c
def drowsy(request: pytest.FixtureRequest) -> Iterator[None]:
    """Waiters without a wake-up sleep for SLICE_S, no waiter spins, and races have delays."""
    source = f"""
    #define SHM_SLICE_NS {int(1e9 * SLICE_S)}
    #define SHM_DELAY_NS 100000
    #define SHM_DELAY_IN {request.param}
    {shm_library.source()}"""
    with compiled(source, _SPIN_S=0, _SPIN_CROWDED_S=0):
        yield


def overslept(end: Shm) -> int:
    """How often a thread has slept for its whole slice although something could move."""
    return int(end.library.shm_overslept(end.handle))


def talk(end: Shm, lane: int, rounds: int, size: int) -> None:
    """Swap messages with all peers, on tags of this lane."""
    peers = [p for p in range(end.world_size) if p != end.rank]
    data = torch.full((size,), lane, dtype=torch.uint8)
    for step in range(rounds):
        tag = lane * rounds + step
        inboxes = [torch.zeros_like(data) for _ in peers]
        coming = [end.irecv(i, p, tag) for i, p in zip(inboxes, peers, strict=True)]
        for p in peers:
            end.isend(data, p, tag).wait()
        for each, inbox in zip(coming, inboxes, strict=True):
            each.wait()
            assert torch.equal(inbox, data)


def talking(a: Shm, b: Shm, c: Shm, less: int) -> None:
    lanes = ((end, lane, 100 // less, 4000 * lane) for end in (a, b, c) for lane in range(3))
    at_once(*(partial(talk, *lane) for lane in lanes), seconds=200)


def pour(a: Shm, b: Shm, less: int) -> None:
    """One way, each message many times as large as a ring."""
    data, inbox = (nothing(1 << 18) for _ in range(2))
    at_once(
        lambda: [a.isend(data, 1, tag).wait() for tag in range(40 // less)],
        lambda: [b.irecv(inbox, 0, tag).wait() for tag in range(40 // less)],
    )


def announce(a: Shm, b: Shm, less: int) -> None:
    """More receives at once than a ring has announcements, and one more while they are announced;
    the sender waits for the last."""
    word, count = nothing(), 1000
    mixed = random.Random(0)

    def receive(tags: range) -> None:
        inboxes = [nothing() for _ in tags]
        pending = [b.irecv(inbox, 0, tag) for inbox, tag in zip(inboxes, tags, strict=True)]
        posted.set()
        for each in pending:
            each.wait()

    def send(tags: range) -> None:
        posted.wait(60)
        for tag in reversed(tags):
            a.isend(word, 1, tag).wait()

    def one_more(tag: int) -> None:
        posted.wait(60)
        time.sleep(mixed.uniform(0, 0.002))
        b.irecv(nothing(), 0, tag).wait()

    for turn in range(15 // less):
        posted = threading.Event()
        tags = range(turn * count, (turn + 1) * count)
        at_once(
            partial(receive, tags[1:]), partial(one_more, tags[0]),
            partial(send, tags[1:]), partial(send, tags[:1]),
        )  # fmt: skip


def lend(a: Shm, b: Shm, less: int) -> None:
    """Each send waits, asleep, for its loan to be given back."""
    data = taken(a, 1000)

    def read() -> None:
        for tag in range(400 // less):
            loan = b.borrow(1000, 0, tag)
            loan.wait()
            time.sleep(0.001)
            loan.give_back()

    at_once(lambda: [a.isend(data, 1, tag).wait() for tag in range(400 // less)], read)
    assert a.lent_bytes == 400 // less * 1000


def beside(a: Shm, b: Shm, less: int) -> None:
    """Many rings' bytes, posted by one thread while another sleeps: the sleeper must continue."""
    lent = taken(a, 1000)
    loan = b.borrow(1000, 0, 0)
    asleep = a.isend(lent, 1, 0)
    loan.wait()
    waiting = threading.Thread(target=asleep.wait)
    waiting.start()
    data, inbox = (nothing(8 << 20) for _ in range(2))
    posted: queue.SimpleQueue[int] = queue.SimpleQueue()

    def receive() -> None:
        for tag in range(1, 40 // less + 1):
            coming = b.irecv(inbox, 0, tag)
            posted.put(tag)
            coming.wait()
        loan.give_back()

    sends: list[Pending] = []

    def send() -> None:
        for _ in range(40 // less):
            tag = posted.get(timeout=60)
            time.sleep(0.002)  # the receiver sleeps by now
            sends.append(a.isend(data, 1, tag))

    at_once(send, receive)
    for each in sends:
        each.wait()
    waiting.join()


def together(a: Shm, b: Shm, less: int) -> None:
    """Two threads wait for sends on one link; the first to end leaves the rest to the other."""
    data = [nothing(size) for size in (100, 20 * RING)]
    inboxes = [torch.zeros_like(each) for each in data]
    sent = threading.Barrier(3, timeout=60)

    def send(lane: int) -> None:
        for step in range(200 // less):
            a.isend(data[lane], 1, 2 * step + lane).wait()
            sent.wait()

    def receive() -> None:
        for step in range(200 // less):
            time.sleep(0.001)  # the senders sleep by now
            for each in [b.irecv(inboxes[lane], 0, 2 * step + lane) for lane in range(2)]:
                each.wait()
            sent.wait()

    at_once(partial(send, 0), partial(send, 1), receive)


@pytest.mark.usefixtures("drowsy")
@pytest.mark.parametrize("less", [4, pytest.param(1, marks=EXHAUSTIVE)])
def test_no_wake_is_lost(less: int) -> None:
    """No thread sleeps for its whole slice while something could move."""
    for scene in (talking, pour, announce, lend, beside, together):
        ring = None if scene is beside else RING  # None: large enough to be drained meanwhile
        ranks = 3 if scene is talking else 2
        with ThreadPoolExecutor(1) as pool, ends(ranks, 60.0, ring_bytes=ring) as made:
            running = pool.submit(scene, *made, less)
            while not running.done() and not any(map(overslept, made)):
                wait([running], 0.1)
            assert [overslept(end) for end in made] == [0] * ranks, scene.__name__
            running.result()


def test_a_driven_end_moves_bytes_while_its_threads_do_something_else() -> None:
    with ends(2, ring_bytes=RING) as (a, b):
        inbox = nothing(20 * RING)
        sent = content((0, 1, 0), 0, 20 * RING)

        def busy() -> None:
            coming = b.irecv(inbox, 0, 0)
            a.isend(sent, 1, 0).wait()  # no thread waits in b
            coming.wait()
            b.close()

        at_once(b.drive, busy)
        assert torch.equal(inbox, sent)


def test_a_rank_s_memory_is_bounded() -> None:
    for peers in (1, 2, 3, 4, 5, 7, 8, 15, 16, 31):
        ring = ring_bytes_for(peers)
        assert ring.bit_count() == 1
        assert ring * peers <= max(1 << 21, peers << 17)
        assert ring >= 1 << 17


# ---- the end of a transport


def test_closing_lets_the_last_sends_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "_LINGER_S", 60.0)  # of a machine that is slow
    with ends(2, 60.0, ring_bytes=1 << 12) as (a, b):
        inbox = nothing(1_000_000)
        coming = b.irecv(inbox, 0, 0)
        a.isend(torch.ones(1_000_000, dtype=torch.uint8), 1, 0)
        at_once(a.close, coming.wait)
        assert bool(inbox.all())


def test_what_is_not_a_frame_is_noticed() -> None:
    with forged() as (end, write):
        coming = end.irecv(nothing(), 1, 0)
        write(0, 8192, 77)  # a tag that was not announced
        write(0, 4096, 64)  # bytes written
        error = failing(coming.wait)
        assert error.peer == 1
        assert "invalid data" in str(error)


def test_a_segment_of_another_size_is_refused() -> None:
    first, second = Shm(0, 2, [1], 5.0, 1 << 12), Shm(1, 2, [0], 5.0, 1 << 13)
    alive = os.pidfd_open(os.getpid())
    with pytest.raises(OSError, match="Invalid argument"):
        first.connect(1, second.fd, alive)
    os.close(alive)
    first.close()
    second.close()


def test_nothing_is_left_of_an_end() -> None:
    def held() -> Counter[str]:
        return mapped() + Counter(open_files())

    with ends(2):  # opens what is opened once per process
        pass
    gc.collect()  # what earlier tests left
    before = held()
    with ends(3) as (a, *_):
        assert any("memfd:gradwire" in name for name in mapped())
        coming = a.irecv(nothing(1000), 1, 0)
    assert not held() - before
    failing(coming.wait)
