"""Torch's ReduceOp in every function that reduces: the same as its name, to the bit."""

from __future__ import annotations

from typing import Any

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


def test_torchs_op_is_its_name() -> None:
    def body(comm: Communicator) -> None:
        for name, codec in [*((name, None) for name in OPS), ("sum", "qsgd:bits=3"),
                            ("avg", "qsgd:bits=3")]:  # fmt: skip
            ops = (name, OPS[name], ReduceOp(OPS[name]))
            named, *others = (reduced(comm, op, codec) for op in ops)
            for other in others:
                assert all(map(torch.equal, named, other)), (name, codec)

    as_threads(3, body)


def test_another_op_is_refused_with_the_list() -> None:
    def body(comm: Communicator) -> None:
        whole, shard = torch.ones(4), torch.ones(2)
        for op in (ReduceOp.PRODUCT, ReduceOp.BAND, "SUM", "mean", None, 3):
            given: Any = op
            for error in (
                caught(lambda: gw.all_reduce(whole, None, op=given, group=comm)),  # noqa: B023
                caught(lambda: gw.reduce_scatter(shard, whole, None, op=given, group=comm)),  # noqa: B023
            ):
                assert isinstance(error, ConfigError), op
                assert "avg" in str(error)

    as_threads(2, body)
