"""reduce_scatter and all_gather: torch's semantics, the laws, ragged shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gradwire import (
    QSGD,
    Codec,
    ConfigError,
    Identity,
    Options,
    TernGrad,
    all_gather,
    reduce_scatter,
)
from gradwire.codecs import RandomK, TopK
from gradwire.collectives import Item, Operation, prepare
from gradwire.engine import Communicator
from gradwire.lang import rng
from gradwire.partition import Spec
from products import every_pair
from ranks import WORLD_SIZES, as_processes, as_threads, caught

SHARDS = [0, 1, 17, 129, 1000]
CODECS: list[Codec] = [
    Identity(),
    QSGD(),
    QSGD(rounding="stochastic"),
    TernGrad(),
    TopK(density=0.05),
    RandomK(density=0.1, unbiased=True),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

with_feedback = pytest.mark.parametrize(
    "codec", [*CODECS[:-1], RandomK(density=0.1)], ids=lambda c: type(c).__name__
)
every_world = pytest.mark.parametrize("n", WORLD_SIZES)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("n", "dtype", "op"), every_pair(WORLD_SIZES, DTYPES, ["sum", "avg"]), ids=str
)
def test_identity_reduce_scatter_is_torchs(n: int, dtype: torch.dtype, op: str) -> None:
    for shard in SHARDS:
        inputs = [randn(n * shard, dtype=dtype, seed=r) for r in range(n)]

        def body(comm: Communicator, inputs=inputs, shard=shard) -> torch.Tensor:  # type: ignore[no-untyped-def]
            given = inputs[comm.rank].clone()
            output = torch.full((shard,), 9.0, dtype=dtype)
            reduce_scatter(output, given, "identity", op=op, group=comm)
            assert torch.equal(given, inputs[comm.rank])
            return output

        total = torch.stack([x.double() for x in inputs]).sum(0) / (n if op == "avg" else 1)
        for rank, found in enumerate(as_threads(n, body)):
            expected = total[rank * shard : (rank + 1) * shard].to(dtype)
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(found, expected, rtol=2 * eps, atol=n * eps)


@pytest.mark.parametrize(("n", "dtype", "codec"), every_pair(WORLD_SIZES, DTYPES, CODECS), ids=str)
def test_all_gather_gives_every_rank_the_same(n: int, dtype: torch.dtype, codec: Codec) -> None:
    """Law 1; with Identity, the values are unchanged."""
    for shard in SHARDS:
        inputs = [randn(shard, dtype=dtype, seed=r) for r in range(n)]

        def body(comm: Communicator, inputs=inputs, shard=shard) -> torch.Tensor:  # type: ignore[no-untyped-def]
            given = inputs[comm.rank].clone()
            output = torch.full((n * shard,), 9.0, dtype=dtype)
            all_gather(output, given, codec, group=comm)
            assert torch.equal(given, inputs[comm.rank])
            return output

        found = as_threads(n, body)
        for other in found[1:]:
            assert torch.equal(found[0], other)
        if isinstance(codec, Identity) or n == 1:
            assert torch.equal(found[0], torch.cat(inputs))


@every_world
@with_feedback
def test_law_2_nothing_is_lost(n: int, codec: Codec) -> None:
    shard = 1000
    inputs = [randn(n * shard, seed=r) for r in range(n)]
    before = [randn(n * shard, seed=50 + r) * 0.1 for r in range(n)]

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        residual = before[comm.rank].clone()
        output = torch.empty(shard)
        reduce_scatter(output, inputs[comm.rank], codec, group=comm, residual=residual)
        return output, residual

    results = as_threads(n, body)
    brought = sum(inputs[r].double() + before[r].double() for r in range(n))
    kept = sum(residual.double() for _, residual in results)
    sent = torch.cat([output for output, _ in results]).double()
    torch.testing.assert_close(sent + kept, brought, rtol=1e-5, atol=1e-5)


@with_feedback
def test_law_4_non_finite_travels(codec: Codec) -> None:
    n, shard, at = 3, 500, 700
    inputs = [randn(n * shard, seed=r) for r in range(n)]
    inputs[2][at] = float("nan")

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        residual, output = torch.zeros(n * shard), torch.empty(shard)
        reduce_scatter(output, inputs[comm.rank], codec, group=comm, residual=residual)
        whole = torch.empty(n * shard)
        all_gather(whole, output, codec, group=comm, step=1)
        return output, residual, whole

    results = as_threads(n, body)
    assert not torch.isfinite(results[1][0][at - shard])
    assert torch.isfinite(results[0][0]).all()
    for _, residual, whole in results:
        assert torch.isfinite(residual).all()
        assert not torch.isfinite(whole[at])


@pytest.mark.parametrize(
    ("n", "codec", "kind", "segments"),
    every_pair(WORLD_SIZES, CODECS, ["reduce_scatter", "all_gather"], [1, 3]),
    ids=str,
)
def test_law_5_bytes_are_accounted(n: int, codec: Codec, kind: str, segments: int) -> None:
    def body(comm: Communicator) -> tuple[int, int]:
        specs = [Spec(f"p{m}", n * m, torch.float32, codec) for m in SHARDS]
        items = [
            Item(torch.ones(n * m), rng.Keys(m, m), 0, home=torch.ones(m))
            if kind == "reduce_scatter"
            else Item(torch.ones(n * m), rng.Keys(m, m), 0)
            for m in SHARDS
        ]
        operation = Operation(kind, "sum" if kind == "reduce_scatter" else "")
        collective = prepare(comm.calls, specs, Options(segments=segments), operation)
        return collective.prepared.wire_bytes, collective.start(items).result().wire_bytes

    for formula, counted in as_threads(n, body):
        assert formula == counted
        assert (formula > 0) == (n > 1)


def test_the_unbiased_randomk_is_unbiased_here() -> None:
    """A rank's own shard is exact and others' are scaled, so the mean over all values is exact."""
    codec, n, pattern = RandomK(density=0.1, values="fp32", unbiased=True), 3, randn(10, seed=4)

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        own = (pattern * (comm.rank + 1)).repeat(10_000)
        output, whole = torch.empty(100_000), torch.empty(n * 100_000)
        reduce_scatter(output, own.repeat(n), codec, op="avg", group=comm)
        all_gather(whole, own, codec, group=comm, step=1)
        return output, whole

    # every block of ten is a draw of the same values
    for output, whole in as_threads(n, body):
        for rank, draws in ((1, output), *enumerate(whole.split(100_000))):
            draws = draws.view(-1, 10).double()
            standard = draws.std(0) / len(draws) ** 0.5 + 1e-7
            assert ((draws.mean(0) - pattern * (rank + 1)).abs() < 5 * standard).all()


def test_error_feedback_of_a_codec_that_scales_is_refused() -> None:
    def body(comm: Communicator) -> BaseException | None:
        output, residual = torch.empty(50), torch.zeros(100)
        codec = RandomK(density=0.1, unbiased=True)
        return caught(
            lambda: reduce_scatter(output, torch.ones(100), codec, group=comm, residual=residual)
        )

    for error in as_threads(2, body):
        assert isinstance(error, ConfigError)
        assert "unbiased=False with error feedback" in str(error)


def test_shards_in_place_strided_and_of_any_shape() -> None:
    def body(comm: Communicator) -> None:
        n, r = comm.world_size, comm.rank
        whole = torch.arange(6.0 * n).view(n, 2, 3) + r
        reduce_scatter(whole[r], whole, "identity", group=comm)  # the own shard of the input
        expected = torch.arange(6.0 * n).view(n, 2, 3)[r] * n + sum(range(n))
        assert torch.equal(whole[r], expected)

        strided = torch.zeros(3, 2).t()
        reduce_scatter(strided, torch.ones(n * 6), "identity", group=comm, step=1)
        assert torch.equal(strided, torch.full((2, 3), float(n)))

        gathered = torch.zeros(6, n).t()
        gathered[r] = r
        all_gather(gathered, gathered[r], "identity", group=comm, step=2)
        assert torch.equal(gathered, torch.arange(float(n)).view(n, 1).expand(n, 6))

    as_threads(3, body)


def test_async_calls_give_their_output() -> None:
    def body(comm: Communicator) -> None:
        output, whole = torch.empty(100), torch.empty(300)
        future = reduce_scatter(
            output, torch.ones(300), QSGD(metadata="fp32"), group=comm, async_op=True
        )
        assert future is not None
        assert future.wait() is output
        future = all_gather(whole, output, "identity", group=comm, async_op=True)
        assert future is not None
        assert torch.equal(future.wait(), torch.full((300,), 3.0))

    as_threads(3, body)


def test_wrong_input_is_refused_before_anything_is_sent() -> None:
    def body(comm: Communicator) -> list[str]:
        shard, whole = torch.zeros(4), torch.zeros(8)
        calls = [
            lambda: reduce_scatter(shard, torch.zeros(9), group=comm),
            lambda: all_gather(torch.zeros(9), shard, group=comm),
            lambda: reduce_scatter(shard, whole.half(), group=comm),
            lambda: reduce_scatter(shard, whole, op="mean", group=comm),
            lambda: reduce_scatter(shard, whole, group=comm, residual=torch.zeros(4)),
            lambda: reduce_scatter(shard, [whole], group=comm),  # type: ignore[arg-type]
            lambda: all_gather(whole, shard, group=comm, step=-1),
        ]
        errors = [caught(call) for call in calls]
        assert all(isinstance(error, ConfigError) for error in errors)
        for call in (
            lambda: all_gather(whole, shard, group=comm, options=Options(algorithm="ring")),
            lambda: all_gather(whole.long(), shard.long(), group=comm),
        ):
            error = caught(call)
            assert isinstance(error, ConfigError)
            errors.append(error)
        all_gather(whole, shard + 1, "identity", group=comm)
        assert torch.equal(whole, torch.ones(8))
        return [str(error) for error in errors]

    texts = as_threads(2, body)[0]
    for text, part in zip(
        texts,
        [
            "input has 9 values; with 2 ranks it must have 8 values: 2 x output's",
            "output has 9 values",
            "input is torch.float16 and output is torch.float32",
            "op 'mean': reduce_scatter takes 'sum', 'avg', 'min', 'max'",
            "residual: 4",
            "input: a dense torch.Tensor is needed, not list",
            "step is -1",
            "all_gather has no algorithm 'ring': use sra",
            "all_gather of torch.int64 through QSGD",
        ],
        strict=True,
    ):
        assert part in text


def beside_torch(rank: int) -> None:
    """The same calls through torch, over gloo."""
    x = randn(2 * 65, seed=rank)
    ours, whole, theirs = torch.empty(65), torch.empty(130), torch.empty(130)
    reduce_scatter(ours, x, "identity")
    all_gather(whole, ours, "identity")
    dist.all_gather_into_tensor(theirs, ours)
    assert torch.equal(whole, theirs)
    dist.all_reduce(x)
    torch.testing.assert_close(whole, x)


def test_beside_torch_over_gloo() -> None:
    as_processes(2, beside_torch)
