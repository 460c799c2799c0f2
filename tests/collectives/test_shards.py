"""reduce_scatter and all_gather: torch's semantics, the laws, ragged shards."""

from __future__ import annotations

from itertools import product

import torch

from gradwire import QSGD, ConfigError, Identity, Options, all_gather, reduce_scatter
from gradwire.codecs import RandomK, TopK
from gradwire.collectives import Item, Operation, prepare
from gradwire.engine import Communicator
from gradwire.lang import rng
from gradwire.partition import Spec
from ranks import as_threads, caught


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_functions_sum_and_gather_and_leave_their_input_unchanged() -> None:
    """Through the unbiased RandomK too, which error feedback refuses."""

    def body(comm: Communicator) -> list[torch.Tensor]:
        found, n = [], comm.world_size
        for shard in (0, 1, 17, 129):
            given = randn(n * shard, seed=comm.rank)
            before, output, whole = given.clone(), torch.full((shard,), 9.0), torch.empty(n * shard)
            reduce_scatter(output, given, "identity", group=comm, step=0)
            assert torch.equal(given, before)
            kept = output.clone()
            all_gather(whole, output, RandomK(0.5, unbiased=True), group=comm, step=0)
            all_gather(whole, output, "identity", group=comm, step=0)
            assert torch.equal(output, kept)
            found.append(whole)
        return found

    for n in (1, 2, 3, 5, 8):
        results = as_threads(n, body)
        for i, shard in enumerate((0, 1, 17, 129)):
            total = torch.stack([randn(n * shard, seed=r).double() for r in range(n)]).sum(0)
            for found in results:
                torch.testing.assert_close(found[i].double(), total, rtol=1e-6, atol=n * 1e-6)


def test_law_5_bytes_of_shards_that_share_a_collective() -> None:
    shards = [0, 1, 17, 129, 1000]

    def body(comm: Communicator) -> None:
        n = comm.world_size
        for codec, kind, segments in product(
            [Identity(), QSGD(), TopK(density=0.05)], ["reduce_scatter", "all_gather"], [1, 3]
        ):
            specs = [Spec(f"p{m}", n * m, torch.float32, codec) for m in shards]
            scatters = kind == "reduce_scatter"
            items = [
                Item(torch.ones(n * m), rng.Keys(m, m), 0, home=torch.ones(m) if scatters else None)
                for m in shards
            ]
            operation = Operation(kind, "sum" if scatters else "")
            collective = prepare(comm.calls, specs, Options(segments=segments), operation)
            sent = collective.start(items).result().wire_bytes
            assert collective.prepared.wire_bytes == sent, (codec, kind, segments)
            assert (sent > 0) == (n > 1)

    for n in (1, 2, 3, 5):
        as_threads(n, body)


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
            "op='mean': use one of sum, avg, min, max",
            "residual: 4",
            "input: a dense torch.Tensor is needed, not list",
            "step is -1",
            "all_gather has no algorithm 'ring': use one of sra",
            "all_gather of torch.int64 through QSGD",
        ],
        strict=True,
    ):
        assert part in text
