"""Collectives in stream order, over links without tags.

tests/laws has their bits, bytes and dead peers, beside those of other links.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch

from fifo import FifoHub
from gradwire import (
    QSGD,
    CodecError,
    ConfigError,
    Options,
    TransportError,
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
)
from gradwire.collectives import Item, prepare
from gradwire.engine import Communicator
from gradwire.lang import rng
from gradwire.partition import Spec
from leftovers import until
from ranks import as_threads, at_once, caught, refuses


def test_jobs_of_several_threads_take_turns() -> None:
    """In the same order on all ranks, which callers must ensure, as with NCCL."""

    def body(comm: Communicator) -> list[torch.Tensor]:
        tensors = [torch.full((1000,), float(comm.rank + i)) for i in range(8)]
        done = [threading.Event() for _ in range(9)]
        done[0].set()

        def turn(i: int) -> None:
            done[i].wait(20)
            all_reduce(tensors[i], "identity", group=comm, name=f"t{i}")
            done[i + 1].set()

        at_once(*(partial(turn, i) for i in range(8)))
        return tensors

    for tensors in as_threads(3, body, fifo=FifoHub(3)):
        assert [float(t[0]) for t in tensors] == [3.0 + 3 * i for i in range(8)]


def test_a_call_beside_another_thread_s_is_refused() -> None:
    """Ranks may meet the two in different orders, and so take the values of one for the other's."""
    begun = threading.Event()

    def body(comm: Communicator) -> None:
        first, x = torch.ones(300), torch.ones(300)
        reduce = partial(all_reduce, group=comm)
        if comm.rank == 1:
            assert begun.wait(60)
            reduce(first)
        else:
            calling = threading.Thread(target=reduce, args=(first,))
            calling.start()
            assert until(lambda: comm.calls.awaited_by is not None)
            for call in (
                partial(reduce, x),
                partial(reduce, x, async_op=True),
                partial(broadcast, x, group=comm),
                partial(all_gather, torch.ones(600), x, group=comm),
                partial(reduce_scatter, torch.ones(150), x, group=comm),
            ):
                refuses("another thread is in a collective of this process group", call)
            begun.set()
            calling.join(60)
        reduce(x, None)  # the next may come from another thread
        assert first.tolist() == x.tolist() == [2.0] * 300

    as_threads(2, body)


def test_a_call_ends_with_what_broke_the_group() -> None:
    """A peer's notice may be in transit while this rank's own link breaks for the same reason."""
    fifo = FifoHub(2, timeout=20)
    reason = TransportError("rank 0: rank 1 has failed: its disk is full", peer=1)

    def body(comm: Communicator) -> list[BaseException | None]:
        reduce = partial(all_reduce, torch.randn(5000), "identity", group=comm)
        reduce()
        if comm.rank == 1:
            fifo.kill(1)
            return []
        assert comm.first_to_fail()  # as when a peer's notice has arrived
        threading.Timer(0.3, comm.end, [reason]).start()
        return [caught(reduce), caught(reduce)]

    assert as_threads(2, body, fifo=fifo)[0] == [reason, reason]


def test_a_bad_payload_breaks_the_group_and_peers_are_told() -> None:
    """On the CPU the kernel reports it at once."""
    fifo = FifoHub(2, timeout=20)
    begin = fifo.begin

    def corrupt(rank: int, batch: Any) -> None:
        for message in batch.messages:
            if rank == 1 and not message.incoming:
                message.memory.fill_(255)
        begin(rank, batch)

    fifo.begin = corrupt  # type: ignore[method-assign]

    def body(comm: Communicator) -> list[BaseException | None]:
        reduce = partial(all_reduce, torch.randn(5000), "topk", group=comm)
        return [caught(reduce), caught(reduce)]

    first, second = as_threads(2, body, fifo=fifo)
    assert isinstance(first[0], CodecError)
    assert first[1] is first[0]
    assert isinstance(second[0], TransportError)
    assert (0, 0) in fifo.blamed


def test_a_checksum_that_nobody_would_compare_is_refused() -> None:
    def body(comm: Communicator) -> BaseException | None:
        return caught(lambda: all_reduce(torch.ones(3), group=comm, options=Options(checksum=True)))

    for error in as_threads(2, body, fifo=FifoHub(2)):
        assert isinstance(error, ConfigError)
        assert "checksum" in str(error)


def test_a_closed_communicator_refuses() -> None:
    def body(comm: Communicator) -> BaseException | None:
        all_reduce(torch.ones(3), group=comm)
        comm.close()
        return caught(lambda: all_reduce(torch.ones(3), group=comm))

    for fifo in (FifoHub(2), None):
        for error in as_threads(2, body, fifo=fifo):
            assert isinstance(error, TransportError)
            assert "destroyed" in str(error)


def test_memory_is_that_of_one_collective() -> None:
    """Each collective reuses the arena of the one before, however many there are."""

    def body(comm: Communicator) -> tuple[int, int]:
        collective = prepare(comm.calls, [Spec("w", 100_000, torch.float32, QSGD())])
        item = Item(torch.ones(100_000), rng.parameter_keys(0, "w", comm.rank), 0)
        for _ in range(5):
            collective.start([item])
        return comm.pools.peak_bytes, collective.prepared[0][0].arena_bytes

    for peak, arena in as_threads(2, body, fifo=FifoHub(2)):
        assert peak == arena
