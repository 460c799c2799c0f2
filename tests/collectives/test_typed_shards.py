"""ReduceScatter and AllGather of unequal shards, adjacent or with gaps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gradwire import QSGD, Codec, Options
from gradwire.codecs import DGC, OneBit, TopK
from gradwire.collectives import AllGather, ReduceScatter, Request, prepare
from gradwire.collectives.calling import begin
from gradwire.engine import Communicator
from products import every_pair
from ranks import WORLD_SIZES, as_threads
from typed_values import DTYPES, FLOATS, check_reduced, generator, same_bits, values

CODECS: dict[str, Codec | None] = {
    "dense": None,
    "qsgd": QSGD(bits=4, block=128),
    "stochastic": QSGD(bits=4, block=128, rounding="stochastic"),
    "topk": TopK(density=0.05),
    "onebit": OneBit(),
    "dgc": DGC(),  # the length of a payload depends on data
}
COMPRESSING = [name for name in CODECS if name != "dense"]
PATTERNS: dict[str, list[int]] = {
    "equal": [17],
    "ragged": [1000, 0, 15, 1, 129],
    "one_has_all": [0, 300, 0, 0, 0, 0, 0, 0],
    "none": [0],
}
GAP = {"side_by_side": 0, "tight": 1, "wide": 37}
Tensors = list[torch.Tensor]


def lengths_of(pattern: str, n: int) -> tuple[int, ...]:
    known = PATTERNS[pattern]
    return tuple(known[r % len(known)] for r in range(n))


def stride_of(lengths: tuple[int, ...], gap: str) -> int:
    """A stride: 0, the least possible, or more."""
    return 0 if not GAP[gap] else max(*lengths, 1) + GAP[gap] - 1


def places(lengths: tuple[int, ...], stride: int) -> list[slice]:
    """The slice of each rank's shard."""
    begins = [r * stride if stride else sum(lengths[:r]) for r in range(len(lengths))]
    return [slice(b, b + length) for b, length in zip(begins, lengths, strict=True)]


def spread(
    values: torch.Tensor, lengths: tuple[int, ...], stride: int, fill: float
) -> torch.Tensor:
    """The shards of `values` at their offsets, with `fill` between them."""
    where = places(lengths, stride)
    memory = torch.full((max(where[-1].stop, sum(lengths)),), fill).to(values.dtype)
    for at, shard in zip(where, values.split(lengths), strict=True):
        memory[at] = shard
    return memory[: where[-1].stop] if stride else memory


def run(comm: Communicator, request: Request, **how: Any) -> torch.Tensor:
    """The result of a single collective on this rank; checks law 5."""
    options = Options(**how)
    running, result = begin(comm, request, "w", 0, 7, options)
    sent = running.result(30).wire_bytes
    spec = request.spec("w", 0, comm.world_size)
    device = request.values.device
    collective = prepare(comm.calls, [spec], options, request.operation, device)
    assert sent == collective.prepared.wire_bytes or collective.prepared.varies
    return result


def filled(memory: torch.Tensor, lengths: tuple[int, ...], stride: int) -> torch.Tensor:
    """The memory between shards."""
    between = torch.ones(memory.numel(), dtype=torch.bool)
    for at in places(lengths, stride):
        between[at] = False
    return memory[between]


@pytest.mark.parametrize(
    ("pattern", "gap", "home", "op", "n"),
    every_pair(PATTERNS, GAP, [False, True], DTYPES, WORLD_SIZES),
)
def test_dense_shards_of_every_dtype(pattern: str, gap: str, home: bool, op: str, n: int) -> None:
    """A reduce-scatter, then an all-gather of its result; gaps stay unchanged, and so does the
    input if there is a home."""
    made = generator()
    lengths = lengths_of(pattern, n)
    stride = stride_of(lengths, gap)
    given = [[values(sum(lengths), dtype, made) for dtype in DTYPES[op]] for _ in range(n)]

    def body(comm: Communicator) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        own = places(lengths, stride)[comm.rank]
        for dtype, mine in zip(DTYPES[op], given[comm.rank], strict=True):
            memory = spread(mine, lengths, stride, 1)
            before = memory.clone()
            at_home = memory[own].clone() if home else None
            shard = run(comm, ReduceScatter(memory, op, lengths, stride, home=at_home))
            if at_home is not None:
                assert shard.data_ptr() == at_home.data_ptr()
                assert same_bits(memory, before)
            assert same_bits(filled(memory, lengths, stride), filled(before, lengths, stride))
            into = torch.ones_like(memory)
            gathered = run(comm, AllGather(shard.clone(), lengths, stride, into))
            assert gathered is into
            assert same_bits(filled(into, lengths, stride), filled(before, lengths, stride))
            assert dtype == into.dtype
            found.append((shard, gathered))
        return found

    found = as_threads(n, body)
    for i, dtype in enumerate(DTYPES[op]):
        whole = torch.cat([rank[i][0] for rank in found])
        check_reduced(op, [rank[i] for rank in given], whole, str(dtype))
        expected = spread(whole, lengths, stride, 1)
        assert all(same_bits(rank[i][1], expected) for rank in found), dtype


@pytest.mark.parametrize(
    ("codec", "dtype", "pattern", "n", "segments"),
    every_pair(CODECS, FLOATS, [*PATTERNS][:3], WORLD_SIZES, [1, 3]),
    ids=str,
)
def test_a_result_does_not_depend_on_the_stride(
    codec: str, dtype: torch.dtype, pattern: str, n: int, segments: int
) -> None:
    """Nor on a home; nor do residuals."""
    made = generator()
    lengths = lengths_of(pattern, n)
    given = [values(sum(lengths), dtype, made) for _ in range(n)]
    kept = [values(sum(lengths), torch.float32, made) / 8 for _ in range(n)]
    wire = CODECS[codec]

    def body(comm: Communicator) -> list[Tensors]:
        found = []
        for gap in GAP:
            stride = stride_of(lengths, gap)
            for home in (False, True):
                memory = spread(given[comm.rank], lengths, stride, 1)
                at_home = memory[places(lengths, stride)[comm.rank]].clone() if home else None
                residual = kept[comm.rank].clone()
                request = ReduceScatter(
                    memory, "avg", lengths, stride, residual, at_home, codec=wire
                )
                shard = run(comm, request, segments=segments)
                gather = AllGather(shard.clone(), lengths, stride=stride, codec=wire)
                gathered = run(comm, gather, segments=segments)
                assert not filled(gathered, lengths, stride).any()
                parts = [gathered[at] for at in places(lengths, stride)]
                found.append([shard, residual, torch.cat(parts)])
        return found

    found = as_threads(n, body)
    for rank in found:
        assert same_bits(rank[0][2], found[0][0][2])  # law 1
        for other in rank[1:]:
            assert all(map(same_bits, rank[0], other))
    for r, at in enumerate(places(lengths, 0)):
        assert same_bits(found[r][0][1][at], kept[r][at])  # the own shard's is unchanged


@pytest.mark.parametrize(
    ("codec", "pattern", "gap", "n"), every_pair(COMPRESSING, [*PATTERNS][:3], GAP, WORLD_SIZES)
)
def test_nothing_of_any_shard_is_lost(codec: str, pattern: str, gap: str, n: int) -> None:
    """Law 2: gradients and residuals before are what was reduced, and residuals after."""
    made = generator()
    lengths = lengths_of(pattern, n)
    stride = stride_of(lengths, gap)
    given = [values(sum(lengths), torch.float32, made) for _ in range(n)]
    before = [values(sum(lengths), torch.float32, made) / 8 for _ in range(n)]
    for r, own in enumerate(places(lengths, 0)):
        before[r][own] = 0

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        residual = before[comm.rank].clone()
        memory = spread(given[comm.rank], lengths, stride, torch.nan)
        wire = CODECS[codec]
        request = ReduceScatter(memory, "sum", lengths, stride, residual, codec=wire)
        return run(comm, request), residual

    found = as_threads(n, body)
    brought = sum(x.double() + e.double() for x, e in zip(given, before, strict=True))
    after = sum(residual.double() for _, residual in found)
    reduced = torch.cat([shard for shard, _ in found]).double()
    torch.testing.assert_close(reduced + after, brought, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_a_gather_into_the_memory_that_has_its_shard(n: int) -> None:
    made = generator()
    lengths = lengths_of("ragged", n)
    given = [values(length, torch.int32, made) for length in lengths]

    def body(comm: Communicator) -> torch.Tensor:
        into = torch.zeros(sum(lengths), dtype=torch.int32)
        own = into[places(lengths, 0)[comm.rank]]
        own.copy_(given[comm.rank])
        return run(comm, AllGather(own, lengths, into=into))

    for whole in as_threads(n, body):
        assert same_bits(whole, torch.cat(given))


def test_shards_without_lengths_at_a_distance() -> None:
    """Equal ones: how many there are follows from the memory; none, too."""

    def body(comm: Communicator) -> None:
        n = comm.world_size
        for shard, stride in ((3, 5), (5, 5), (0, 5)):
            memory = torch.arange(float((n - 1) * stride + shard))
            expected = n * memory[comm.rank * stride :][:shard]
            reduce = ReduceScatter(memory, "sum", stride=stride)
            assert reduce.spec("w", 0, n).numel == n * shard
            assert torch.equal(run(comm, reduce), expected)
            gathered = run(comm, AllGather(expected.clone(), stride=stride))
            assert gathered.numel() == memory.numel()

    as_threads(3, body)


def test_specs_differ_by_their_shards() -> None:
    request = ReduceScatter(torch.zeros(9), lengths=(1, 2, 6))
    spec = request.spec("w", 0, 3)
    for other in (replace(spec, lengths=(2, 1, 6)), replace(spec, stride=6)):
        assert other != spec
        assert str(other) != str(spec)
