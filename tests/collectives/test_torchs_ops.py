"""Torch's ReduceOp in every function that reduces: the same as its name, to the bit."""

from __future__ import annotations

import torch
from torch.distributed import ReduceOp

import gradwire as gw
from gradwire.engine import Communicator
from ranks import as_threads

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
