"""Typed collectives: every verb, operator, dtype, algorithm and world size, against torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fifo import FifoHub
from gradwire import QSGD, Codec, Options, all_gather, all_reduce, broadcast, reduce_scatter
from gradwire.codecs import OneBit, TopK
from gradwire.collectives import Operation, prepare
from gradwire.engine import Communicator
from laws.ways import WAYS
from products import exhaustive
from ranks import as_threads
from rooms.collectives import uncompressed
from typed_values import (
    DTYPES,
    EVERY_DTYPE,
    FLOATS,
    SIZES,
    check_reduced,
    generator,
    items_of,
    name_of,
    same_bits,
    specs_of,
    values,
)

# ways that other ways below are parts of
ALIKE = ("servers", "coordinated_servers", "in_turn", "one_machine", "grid_of_pairs", "anywhere")
DOWN = {"sra": Options(segments=2), "tree": Options(algorithm="tree")}
Tensors = list[torch.Tensor]


def run(
    comm: Communicator,
    operation: Operation,
    tensors: Tensors,
    options: Options,
    codecs: list[Codec] | None = None,
) -> None:
    """One collective on all tensors, in place; law 5 holds."""
    codecs = codecs or [uncompressed(operation, t.dtype) for t in tensors]
    specs = specs_of(tensors, codecs)
    collective = prepare(comm.calls, specs, options, operation)
    sent = collective.start(items_of(comm, specs, tensors)).result(30).wire_bytes
    assert sent == collective.prepared[0][0].wire_bytes
    assert (sent > 0) == (comm.world_size > 1) or operation.verb == "broadcast"


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ALIKE] + exhaustive(*ALIKE))
def test_all_reduce(way: str) -> None:
    """Tensors of all dtypes of an operator in one collective; law 1. NaN travels through min and
    max, and appears at no other index; zeros of mixed signs get the same sign on all ranks."""
    for number, op in enumerate(DTYPES):
        n, made = (5, 3, 8, 2, 1)[(number + [*WAYS].index(way)) % 5], generator()
        sizes = [(numel, dtype) for dtype in DTYPES[op] for numel in SIZES]
        given = [[values(*size, made) for size in sizes] for _ in range(n)]
        if op in ("min", "max"):
            for rank, tensors in enumerate(given):
                for t in (t for t in tensors if t.dtype.is_floating_point and len(t) > 500):
                    t[:3] = -0.0 if rank % 2 else 0.0
                    t[rank * 50 + 7] = torch.nan
                    t[-1] = torch.inf if rank == 1 else -torch.inf

        def body(comm: Communicator, op: str = op, given: list[Tensors] = given) -> Tensors:
            mine, n = [t.clone() for t in given[comm.rank]], comm.world_size
            options = replace(WAYS[way](n), segments=1 + n % 3)
            run(comm, Operation("all_reduce", op), mine, options)
            return mine

        found = as_threads(n, body)
        for i, (numel, dtype) in enumerate(sizes):
            where = f"{n} ranks, {op}: {numel} x {dtype}"
            assert all(same_bits(rank[i], found[0][i]) for rank in found), where
            check_reduced(op, [rank[i] for rank in given], found[0][i], where)


@pytest.mark.parametrize("n", [3, *exhaustive(2, 5)])
def test_all_gather_changes_no_bit_of_any_dtype(n: int) -> None:
    """NaN and -0 with their bits, complex numbers and whole ones."""
    made = generator()
    sizes = [(numel, dtype) for dtype in EVERY_DTYPE for numel in SIZES]
    given = [[values(*size, made) for size in sizes] for _ in range(n)]
    for rank in given:
        for t in (t for t in rank if t.dtype.is_floating_point and t.numel() > 2):
            t[1], t[2] = -0.0, torch.nan

    def body(comm: Communicator) -> Tensors:
        whole = [torch.empty(n * numel, dtype=dtype) for numel, dtype in sizes]
        for all_values, own in zip(whole, given[comm.rank], strict=True):
            all_gather(all_values, own, None, group=comm, name=name_of(own))
        return whole

    found = as_threads(n, body)
    for rank in found:
        for i, whole in enumerate(rank):
            assert same_bits(whole, torch.cat([r[i] for r in given])), name_of(whole)


CODECS: dict[str, Codec] = {
    "qsgd": QSGD(bits=4, block=128),
    "stochastic": QSGD(bits=4, block=128, rounding="stochastic"),
    "topk": TopK(density=0.05),
    "onebit": OneBit(),
}


@pytest.mark.parametrize("n", [1, 2, 3, 5, *exhaustive(8)])
@pytest.mark.parametrize("way", DOWN)
def test_broadcast_from_every_root(way: str, n: int) -> None:
    """Uncompressed values of every dtype arrive with all their bits, and the root keeps its own.
    Through a codec, the result is the root's values within the codec's error, on the root too."""
    made, name = generator(), [*CODECS][(n + [*DOWN].index(way)) % len(CODECS)]
    sizes = [(numel, dtype) for dtype in EVERY_DTYPE for numel in SIZES]
    given = [[values(*size, made) for size in sizes] for _ in range(n)]
    floats = [i for i, (_, dtype) in enumerate(sizes) if dtype in FLOATS]

    def body(comm: Communicator) -> list[tuple[Tensors, Tensors]]:
        found = []
        for root in range(n):
            mine = [t.clone() for t in given[comm.rank]]
            coded = [mine[i].clone() for i in floats]
            run(comm, Operation("broadcast", root=root), mine, DOWN[way])
            codecs = [CODECS[name]] * len(coded)
            run(comm, Operation("broadcast", root=root), coded, DOWN[way], codecs)
            found.append((mine, coded))
        return found

    found = as_threads(n, body)
    for root in range(n):
        for rank in found:
            for t, expected in zip(rank[root][0], given[root], strict=True):
                assert same_bits(t, expected), f"root {root}: {name_of(t)}"
        for i, x in enumerate(given[root][i] for i in floats):
            got, where = found[0][root][1][i], f"{name}, root {root}: {name_of(x)}"
            assert all(same_bits(rank[root][1][i], got) for rank in found), where
            assert n > 1 or same_bits(got, x), where
            if n > 1 and x.numel():
                check_kept(name, x.double(), got.double(), where)


def check_kept(codec: str, x: torch.Tensor, got: torch.Tensor, where: str) -> None:
    error = (got - x).abs()
    if codec == "qsgd":  # at most a step of the grid of 15 over the block's range, and a rounding
        span = float(x.max() - x.min()) + float(x.abs().max())
        assert float(error.max()) <= span / 7, where
    elif codec == "topk":  # picked values are unchanged, in 16 bits; the largest is picked
        picked = got != 0
        assert bool((error[picked] <= 2**-8 * x.abs()[picked]).all()), where
        assert bool(picked[x.abs().argmax()]), where
        assert abs(int(picked.sum()) - 0.05 * x.numel()) <= 8, where  # a rounding in each chunk
    else:  # two values in each block, closer to its own than zero is
        assert float(error.square().sum()) < float(x.square().sum()) or x.numel() == 1, where


def test_the_functions_on_tensors_that_are_not_contiguous() -> None:
    for i, dtype in enumerate(EVERY_DTYPE):
        check_crooked(dtype, n=(2, 3, 1, 5)[i % 4])


def check_crooked(dtype: torch.dtype, n: int) -> None:
    made = generator()
    given = [values(35, dtype, made).view(5, 7) for _ in range(n)]
    op = "max" if dtype is torch.bool else "sum"
    reduces = not dtype.is_complex

    def body(comm: Communicator) -> list[Tensors]:
        found = []
        for asynchronous in (False, True):
            sent, reduced = given[comm.rank].clone().t(), given[comm.rank].clone().t()
            how: dict[str, Any] = {"group": comm, "async_op": asynchronous}
            future = broadcast(sent, n - 1, algorithm="tree", **how)
            assert future is None or future.wait() is sent
            if reduces:
                future = all_reduce(reduced, None, op=op, algorithm="ring", **how)
                assert future is None or future.wait() is reduced
            whole = torch.zeros(7, 5, n, dtype=dtype).permute(2, 0, 1)
            future = all_gather(whole, given[comm.rank].t(), None, **how)
            assert future is None or future.wait() is whole
            shard = torch.zeros(5, 7, dtype=dtype).t()
            if reduces:
                future = reduce_scatter(shard, whole, None, op=op, **how)
                assert future is None or future.wait() is shard
            found += [sent, reduced, whole, shard]
        return found

    fifo = FifoHub(n, lazy=n == 2) if dtype.is_floating_point else None  # in order, then
    for rank, tensors in enumerate(as_threads(n, body, fifo=fifo)):
        for sent, reduced, whole, shard in (tensors[:4], tensors[4:]):
            assert same_bits(sent, given[n - 1].t())
            assert same_bits(whole, torch.stack([x.t() for x in given]))
            if reduces:
                check_reduced(op, given, reduced.t().contiguous(), "all_reduce")
                check_reduced(op, [given[rank]] * n, shard.t().contiguous(), "reduce_scatter")


def test_the_functions_on_views_that_conjugate_or_negate() -> None:
    """Lazy views: on one rank, at a root, and as the memory to fill."""
    made = generator()
    given = [values(9, torch.complex64, made) for _ in range(2)]

    def body(comm: Communicator) -> None:
        for root in range(2):
            x = given[comm.rank].clone()
            x = x.conj() if comm.rank == 0 else x
            expected = given[1] if root else given[0].conj()
            broadcast(x, root, group=comm)
            assert torch.equal(x, expected)
        whole = torch.zeros(18, dtype=torch.complex64).conj()
        all_gather(whole, given[comm.rank].conj(), None, group=comm)
        assert torch.equal(whole, torch.cat(given).conj())
        negative = given[comm.rank].conj()[:1].imag
        assert negative.is_neg()
        all_reduce(negative, None, op="min", group=comm)
        assert torch.equal(negative, torch.minimum(-given[0][:1].imag, -given[1][:1].imag))

    as_threads(2, body)


@pytest.mark.parametrize(
    ("n", "lazy"), [(2, True), (3, False), *exhaustive((1, False), (5, False), (3, True))]
)
def test_in_stream_order_they_give_the_same_bits(n: int, lazy: bool) -> None:
    made = generator()
    given = [[values(1000, dtype, made) for dtype in EVERY_DTYPE] for _ in range(n)]

    def body(comm: Communicator) -> Tensors:
        mine = []
        for root in range(n):
            for way, options in DOWN.items():
                sent = [t.clone() for t in given[comm.rank]]
                run(comm, Operation("broadcast", root=root), sent, options)
                coded = [t.clone() for t in given[comm.rank] if t.dtype in FLOATS]
                codec = CODECS["topk" if way == "tree" else "qsgd"]
                run(comm, Operation("broadcast", root=root), coded, options, [codec] * len(coded))
                mine += sent + coded
        for op, dtypes in DTYPES.items():
            reduced = [t.clone() for t in given[comm.rank] if t.dtype in dtypes]
            run(comm, Operation("all_reduce", op), reduced, Options(algorithm="ring"))
            mine += reduced
        return mine

    ordered, queued = as_threads(n, body, fifo=FifoHub(n, lazy)), as_threads(n, body)
    for rank, (found, expected) in enumerate(zip(ordered, queued, strict=True)):
        for got, other in zip(found, expected, strict=True):
            assert same_bits(got, other), f"rank {rank}: {name_of(got)}"
