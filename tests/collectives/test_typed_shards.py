"""ReduceScatter and AllGather of shards: where their memory is; and the functions.

tests/laws/test_shard_laws.py has their laws.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gradwire import Options, all_gather, reduce_scatter
from gradwire.codecs import RandomK
from gradwire.collectives import AllGather, ReduceScatter
from gradwire.engine import Communicator
from laws.shards import run
from ranks import as_threads
from typed_values import generator, same_bits, values


def test_a_gather_into_the_memory_that_has_its_shard() -> None:
    made = generator()
    lengths = (1000, 0, 15, 1, 129)
    given = [values(length, torch.int32, made) for length in lengths]

    def body(comm: Communicator) -> torch.Tensor:
        n = comm.world_size
        into = torch.zeros(sum(lengths[:n]), dtype=torch.int32)
        own = into[sum(lengths[: comm.rank]) :][: lengths[comm.rank]]
        own.copy_(given[comm.rank])
        return run(comm, AllGather(own, lengths[:n], into=into), Options())

    for n in (1, 3, 5):
        for whole in as_threads(n, body):
            assert same_bits(whole, torch.cat(given[:n]))


def test_shards_without_lengths_at_a_distance() -> None:
    """Equal ones: how many there are follows from the memory; none, too."""

    def body(comm: Communicator) -> None:
        n = comm.world_size
        for shard, stride in ((3, 5), (5, 5), (0, 5)):
            memory = torch.arange(float((n - 1) * stride + shard))
            expected = n * memory[comm.rank * stride :][:shard]
            reduce = ReduceScatter(memory, "sum", stride=stride)
            assert reduce.spec("w", 0, n).numel == n * shard
            assert torch.equal(run(comm, reduce, Options()), expected)
            gathered = run(comm, AllGather(expected.clone(), stride=stride), Options())
            assert gathered.numel() == memory.numel()

    as_threads(3, body)


def test_specs_differ_by_their_shards() -> None:
    request = ReduceScatter(torch.zeros(9), lengths=(1, 2, 6))
    spec = request.spec("w", 0, 3)
    for other in (replace(spec, lengths=(2, 1, 6)), replace(spec, stride=6)):
        assert other != spec
        assert str(other) != str(spec)


def test_the_unbiased_randomk_is_unbiased_here() -> None:
    """A rank's own shard is exact and others' are scaled, so the mean over all values is exact."""
    codec, n = RandomK(density=0.1, values="fp32", unbiased=True), 3
    pattern = torch.randn(10, generator=torch.Generator().manual_seed(4))

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
