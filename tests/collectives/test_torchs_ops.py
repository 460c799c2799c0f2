"""Torch's ReduceOp in every function that reduces: the same as its name, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ReduceOp

import gradwire as gw
from gradwire.engine import Communicator
from gradwire.errors import ConfigError
from ranks import as_threads, caught

OPS = {"sum": ReduceOp.SUM, "avg": ReduceOp.AVG, "min": ReduceOp.MIN, "max": ReduceOp.MAX}


def reduced(comm: Communicator, op: object, codec: str | None) -> list[torch.Tensor]:
    values = torch.randn(301 * comm.world_size, generator=torch.Generator().manual_seed(comm.rank))
    whole, shard = values.clone(), torch.empty(301)
    gw.all_reduce(whole, codec, op=op, group=comm, step=0)  # type: ignore[arg-type]
    gw.reduce_scatter(shard, values, codec, op=op, group=comm, step=0)  # type: ignore[arg-type]
    return [whole, shard]


@pytest.mark.parametrize("codec", [None, "qsgd:bits=3"])
@pytest.mark.parametrize("name", OPS)
def test_torchs_op_is_its_name(name: str, codec: str | None) -> None:
    if codec is not None and name in ("min", "max"):
        pytest.skip("codecs sum and average alone")

    def body(comm: Communicator) -> list[list[torch.Tensor]]:
        ops = (name, OPS[name], ReduceOp(OPS[name]))
        return [reduced(comm, op, codec) for op in ops]

    for named, *others in as_threads(3, body):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(named, other, strict=True))


@pytest.mark.parametrize("op", [ReduceOp.PRODUCT, ReduceOp.BAND, "SUM", "mean", None, 3])
def test_another_op_is_refused_with_the_list(op: object) -> None:
    def body(comm: Communicator) -> list[BaseException | None]:
        whole, shard = torch.ones(4), torch.ones(2)
        return [
            caught(lambda: gw.all_reduce(whole, None, op=op, group=comm)),  # type: ignore[arg-type]
            caught(lambda: gw.reduce_scatter(shard, whole, None, op=op, group=comm)),  # type: ignore[arg-type]
        ]

    for errors in as_threads(2, body):
        assert all(isinstance(error, ConfigError) and "'avg'" in str(error) for error in errors)
