"""Collectives in stream order, over links without tags: the same bits as on the thread driver."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fifo import FifoHub
from gradwire import (
    QSGD,
    Codec,
    CodecError,
    ConfigError,
    Identity,
    Options,
    TransportError,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from gradwire.codecs import TopK
from gradwire.collectives import SUM, Item, prepare
from gradwire.engine import Communicator
from gradwire.lang import rng
from gradwire.partition import Spec
from products import every_pair
from ranks import WORLD_SIZES, as_threads, caught

SIZES = [1, 17, 0, 128, 129, 1000, 3025]
CODECS: list[Codec] = [Identity(), QSGD(), QSGD(rounding="stochastic"), TopK(density=0.05)]

WAYS: dict[str, Any] = {
    "sra": lambda n: Options(segments=3),
    "sra_one_segment": lambda n: Options(segments=1),
    "ring": lambda n: Options(algorithm="ring", segments=2),
    "tree": lambda n: Options(algorithm="tree", segments=3),
    "servers": lambda n: Options(algorithm="parameter_server", partitions=3, segments=2),
    "coordinated": lambda n: Options(coordinated=True, segments=3),
    "all_gather": lambda n: Options(algorithm="all_gather", segments=2),
    "machines_of_2": lambda n: Options(
        algorithm="hierarchical", nodes=tuple(r // 2 for r in range(n)), inside="full", segments=2
    ),
    "grid": lambda n: Options(algorithm="hierarchical", nodes=tuple(range(n)), between="grid"),
    "3_machines_in_turn": lambda n: Options(
        algorithm="hierarchical", nodes=tuple(r % 3 for r in range(n)), inside="codec", segments=3
    ),
}

lazily = pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
every_world = pytest.mark.parametrize("n", WORLD_SIZES)


def both(n: int, lazy: bool, body: Any) -> tuple[list[Any], list[Any]]:
    """The results of `body` in stream order, and on the thread driver with tags."""
    return as_threads(n, body, fifo=FifoHub(n, lazy)), as_threads(n, body)


@pytest.mark.parametrize(
    ("way", "codec", "n", "lazy"), every_pair(WAYS, CODECS, WORLD_SIZES, [False, True]), ids=str
)
def test_same_bits_and_bytes(way: str, codec: Codec, n: int, lazy: bool) -> None:
    made = torch.Generator().manual_seed(n)
    data = [[torch.randn(m, generator=made) for m in SIZES] for _ in range(n)]

    def body(comm: Communicator) -> tuple[list[torch.Tensor], list[int]]:
        specs = [
            Spec(f"p{i}", m, torch.float32, codec, True, rotation=i) for i, m in enumerate(SIZES)
        ]
        values = [t.clone() for t in data[comm.rank]]
        residuals = [torch.zeros_like(t) for t in values]
        collective = prepare(comm.calls, specs, WAYS[way](n))
        sent = []
        for step in range(2):  # the second reuses the first's memory
            items = [
                Item(t, rng.parameter_keys(0, f"p{i}", comm.rank), step, r)
                for i, (t, r) in enumerate(zip(values, residuals, strict=True))
            ]
            sent.append(collective.start(items).result(30).wire_bytes)
        assert sent == [collective.prepared.wire_bytes] * 2
        return [*values, *residuals], sent

    ordered, queued = both(n, lazy, body)
    for (found, sent), (expected, counted) in zip(ordered, queued, strict=True):
        assert all(map(torch.equal, found, expected))
        assert sent == counted


@every_world
@lazily
@pytest.mark.parametrize("inside", ["codec", "full"])
def test_shards_in_two_levels(n: int, lazy: bool, inside: str) -> None:
    """On machines of two, and on three machines in turn."""

    def body(comm: Communicator) -> list[torch.Tensor]:
        found = []
        for nodes in (tuple(r // 2 for r in range(n)), tuple(r % 3 for r in range(n))):
            machines = Options(algorithm="hierarchical", nodes=nodes, segments=3)
            whole = torch.randn(n * 900, generator=torch.Generator().manual_seed(comm.rank))
            shard, gathered, residual = torch.empty(900), torch.empty(n * 900), whole / 8
            options = replace(machines, inside=inside)
            reduce_scatter(shard, whole, "qsgd", group=comm, residual=residual, options=options)
            all_gather(gathered, shard, "qsgd", group=comm, options=machines)
            found += [shard, gathered, residual]
        return found

    for found, expected in zip(*both(n, lazy, body), strict=True):
        assert all(map(torch.equal, found, expected))


@every_world
@lazily
def test_the_functions(n: int, lazy: bool) -> None:
    """all_reduce, reduce_scatter and all_gather, of tensors that are not contiguous too."""

    def body(comm: Communicator) -> list[torch.Tensor]:
        made = torch.Generator().manual_seed(comm.rank)
        whole = torch.randn(n * 100, 7, generator=made)
        reduced, crooked = whole.clone(), whole.t().contiguous().t()
        all_reduce(reduced, "qsgd", op="avg", group=comm, step=3)
        future = all_reduce(crooked, "qsgd", op="avg", group=comm, step=3, async_op=True)
        assert future is not None
        assert future.wait() is crooked
        shard, gathered = torch.empty(100, 7), torch.empty(n * 100, 7)
        reduce_scatter(shard, whole, "qsgd", group=comm)
        all_gather(gathered, shard, "qsgd", group=comm)
        assert torch.equal(reduced, crooked)
        return [reduced, shard, gathered]

    for found, expected in zip(*both(n, lazy, body), strict=True):
        assert all(map(torch.equal, found, expected))


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

        threads = [threading.Thread(target=turn, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return tensors

    for tensors in as_threads(3, body, fifo=FifoHub(3)):
        assert [float(t[0]) for t in tensors] == [3.0 + 3 * i for i in range(8)]


@pytest.mark.parametrize("way", WAYS)
def test_a_dead_peer_is_named_by_every_survivor(way: str) -> None:
    fifo = FifoHub(4, timeout=20)

    def body(comm: Communicator) -> list[BaseException | None]:
        if comm.rank == 2:
            comm.stream(torch.device("cpu"))
            prepare(comm.calls, [Spec("tensor", 5000, torch.float32, QSGD())], WAYS[way](4), SUM)
            fifo.kill(2)
            return []
        reduce = partial(all_reduce, torch.randn(5000), "qsgd", group=comm, options=WAYS[way](4))
        return [caught(reduce), caught(reduce)]

    for errors in as_threads(4, body, fifo=fifo):
        assert all(isinstance(e, TransportError) and e.peer == 2 for e in errors)


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

    for error in as_threads(2, body, fifo=FifoHub(2)):
        assert isinstance(error, TransportError)
        assert "destroyed" in str(error)


def test_memory_is_that_of_one_collective() -> None:
    """Each collective reuses the arena of the one before, however many there are."""

    def body(comm: Communicator) -> tuple[int, int]:
        collective = prepare(comm.calls, [Spec("w", 100_000, torch.float32, QSGD())])
        item = Item(torch.ones(100_000), rng.parameter_keys(0, "w", comm.rank), 0)
        for _ in range(5):
            collective.start([item])
        return comm.pools.peak_bytes, collective.prepared.arena_bytes

    for peak, arena in as_threads(2, body, fifo=FifoHub(2)):
        assert peak == arena
