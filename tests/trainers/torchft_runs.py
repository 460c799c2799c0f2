"""`gw.attach` within torchft's replica groups."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import torch
import torchft
from torch import nn
from torch.distributed.fsdp import fully_shard
from trained import compressed, net

import gradwire as gw

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchft_ddp.py"


def averages_between_groups(rank: int, replica: int, lighthouse: str) -> torch.Tensor:
    """FSDP2 in a group of two ranks; its shards are averaged with the other group's."""
    example = runpy.run_path(str(EXAMPLE))
    model: nn.Module = net()
    fully_shard(model)
    handle = gw.attach(model, "qsgd:bits=4", error_feedback=True)
    manager = torchft.Manager(
        example["CompressedGloo"](gw.QSGD(bits=8), smallest=1024), lambda _: None, dict,
        min_replica_size=2, replica_id=f"replica{replica}", lighthouse_addr=lighthouse,
        rank=rank, world_size=2, store_addr=os.environ["MASTER_ADDR"],
        store_port=int(os.environ["MASTER_PORT"]), init_sync=False,
    )  # fmt: skip
    model.set_all_reduce_hook(lambda shard: manager.allreduce(shard).wait())
    optimizer = torchft.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    draw = torch.Generator().manual_seed(2 * replica + rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=draw)).square().mean().backward()
        optimizer.step()
    assert manager.current_step() == 3
    assert manager.num_participants() == 2
    compressed(handle)
    whole = torch.cat([p.full_tensor().flatten() for p in model.parameters()])
    manager.shutdown()
    return whole.detach()
