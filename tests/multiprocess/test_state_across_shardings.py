"""A state of DDP, of FSDP2 by rows, and by columns, loaded into each of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw

WAYS = ("ddp", "rows", "columns")


def made(way: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 4, bias=False))
    if way == "ddp":
        model = DDP(model)
    else:
        dim = WAYS.index(way) - 1
        model = fully_shard(model, shard_placement_fn=lambda p: Shard(dim))
    return model, gw.attach(model, "topk:density=0.1", error_feedback=True)


def summed(model: nn.Module, step: int) -> list[torch.Tensor]:
    """The sums over ranks of the gradients of a step, by parameter; averages, without a handle."""
    model.zero_grad()
    of_rank = torch.Generator().manual_seed(10 * step + dist.get_rank())
    model(torch.randn(8, 16, generator=of_rank)).square().mean().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [getattr(g, "full_tensor", lambda g=g: g)().double().flatten() for g in found]


def exact(step: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 4, bias=False))
    gradients = summed(model, step)
    for gradient in gradients:
        dist.all_reduce(gradient)
    return gradients


def kept(full: Any) -> list[torch.Tensor]:
    """The sums over ranks of what was not sent."""
    ranks = [list(state["aggregators"].values()) for state in full["ranks"]]
    return [sum(of["residual"].double() for of in both) for both in zip(*ranks, strict=True)]  # type: ignore[misc]


def test_it_moves_from_each_to_each(rank: int) -> None:
    """Law 2, after the save and after a step of the module that has loaded it."""
    ranks = dist.get_world_size()
    first, second = exact(0), exact(1)
    for saved in WAYS:
        model, handle = made(saved)
        sent = summed(model, 0)
        full = handle.full_state_dict()
        owed = kept(full)
        for gradient, average, rest in zip(first, sent, owed, strict=True):
            torch.testing.assert_close(ranks * average + rest, gradient, rtol=0, atol=1e-6)
            assert rest.any()
        for way in WAYS:
            again, other = made(way)
            other.load_state_dict(full)
            for a, b in zip(owed, kept(other.full_state_dict()), strict=True):
                assert torch.equal(a, b), (saved, way)
            averages = summed(again, 1)
            after = kept(other.full_state_dict())
            for gradient, average, rest, before in zip(second, averages, after, owed, strict=True):
                torch.testing.assert_close(
                    ranks * average + rest, gradient + before, rtol=0, atol=1e-6
                )
