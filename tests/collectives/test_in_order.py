"""Collectives in stream order, over links without tags.

tests/laws has their bits, bytes and dead peers, beside those of other links.
"""

from __future__ import annotations

import threading
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from fifo import FifoHub
from gradwire import (
    QSGD,
    CodecError,
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
from ranks import as_threads, caught, raises, refuses


@pytest.mark.parametrize("fifo", [FifoHub(2), None], ids=["in order", "with tags"])
def test_threads_take_turns_and_a_call_beside_another_is_refused(fifo: FifoHub | None) -> None:
    """Ranks may meet the two in different orders, and so take the values of one for the other's."""
    begun = threading.Event()

    def body(comm: Communicator) -> None:
        tensors = [torch.full((1000,), float(comm.rank + i)) for i in range(8)]
        reduce = partial(all_reduce, group=comm)
        calling = [
            threading.Thread(target=reduce, args=(t, "identity"), kwargs={"name": f"t{i}"})
            for i, t in enumerate(tensors)
        ]
        if comm.rank == 1:
            assert begun.wait(60)
        calling[0].start()
        if comm.rank == 0:
            assert until(lambda: comm.calls.core.issued)
            x = torch.ones(300)
            for call in (
                partial(reduce, x),
                partial(reduce, x, async_op=True),
                partial(broadcast, x, group=comm),
                partial(all_gather, torch.ones(600), x, group=comm),
                partial(reduce_scatter, torch.ones(150), x, group=comm),
            ):
                refuses("another thread is in a collective of this process group", call)
            begun.set()
        for before, following in pairwise(calling):
            before.join(60)
            following.start()
        calling[-1].join(60)
        assert [float(t[0]) for t in tensors] == [1.0 + 2 * i for i in range(8)]

    as_threads(2, body, fifo=fifo)


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


def test_a_closed_communicator_refuses() -> None:
    def body(comm: Communicator) -> None:
        reduce = partial(all_reduce, torch.ones(3), group=comm)
        reduce()
        comm.close()
        raises(TransportError, reduce, "destroyed")

    for fifo in (FifoHub(2), None):
        as_threads(2, body, fifo=fifo)


CHECKSUM = Options(checksum=True)


def test_memory_is_that_of_one_collective_and_no_checksum_is_taken() -> None:
    """Each collective reuses the arena of the one before, however many there are."""

    def body(comm: Communicator) -> tuple[int, int]:
        collective = prepare(comm.calls, [Spec("w", 100_000, torch.float32, QSGD())])
        item = Item(torch.ones(100_000), rng.parameter_keys(0, "w", comm.rank), 0)
        for _ in range(5):
            collective.start([item])
        # Nobody would compare it.
        refuses("checksum", partial(all_reduce, item.values, group=comm, options=CHECKSUM))
        return comm.pools.peak_bytes, collective.prepared[0][0].arena_bytes

    for peak, arena in as_threads(2, body, fifo=FifoHub(2)):
        assert peak == arena
