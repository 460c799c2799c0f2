"""ReduceScatter and AllGather of shards: where their memory is.

tests/laws/test_shard_laws.py has their laws.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gradwire import Options
from gradwire.collectives import AllGather, ReduceScatter, Request, prepare
from gradwire.engine import Communicator
from ranks import as_threads
from rooms.collectives import begin
from typed_values import generator, same_bits, values


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


def test_a_gather_into_the_memory_that_has_its_shard() -> None:
    made = generator()
    lengths = (1000, 0, 15, 1, 129)
    given = [values(length, torch.int32, made) for length in lengths]

    def body(comm: Communicator) -> torch.Tensor:
        n = comm.world_size
        into = torch.zeros(sum(lengths[:n]), dtype=torch.int32)
        own = into[sum(lengths[: comm.rank]) :][: lengths[comm.rank]]
        own.copy_(given[comm.rank])
        return run(comm, AllGather(own, lengths[:n], into=into))

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
