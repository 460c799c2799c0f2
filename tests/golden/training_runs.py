"""Golden runs of training: two processes, three steps, through `gw.attach` and the backend.

The model consists of products of single values, so its gradients have the same bits on every
machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from golden.runs import Found, digest, line, values
from ranks import as_processes

STEPS = 3
SHAPES = {
    "wide": (300, 50),
    "bias": (50,),
    "deep": (70, 90),
    "norm": (70,),
    "long": (2, 11_111),
}
HALF = {"brief": (64, 40)}
LEARNING_RATE = 0.125  # a power of two, so that every update is rounded once


class Products(nn.Module):
    """A loss whose gradient for a parameter p is p * x, where x is the input of the step."""

    def __init__(self, half: bool, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        for i, (name, shape) in enumerate({**shapes, **(HALF if half else {})}.items()):
            dtype = torch.bfloat16 if name in HALF else torch.float32
            start = values(torch.Size(shape).numel(), dtype, 2000 + i).view(shape)
            setattr(self, name, nn.Parameter(start))

    def forward(self, step: int) -> torch.Tensor:
        loss = torch.zeros(())
        for i, parameter in enumerate(self.parameters(recurse=False)):
            seed = 3000 + 100 * dist.get_rank() + 10 * step + i
            x = values(parameter.numel(), torch.float32, seed).view(parameter.shape)
            loss = loss + (parameter.float().square() * (x / 2)).sum()
        return loss


def train(model: nn.Module) -> None:
    for step in range(STEPS):
        model.zero_grad()
        model(step).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LEARNING_RATE * parameter.grad


def weights(model: nn.Module) -> list[torch.Tensor]:
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return [p.detach() for p in whole]


def attached(rank: int) -> dict[str, Found]:
    """The results of each way of attaching on this rank."""
    found = {}
    for feedback in (False, True):
        for coalesce in (0, None):
            model = DDP(Products(half=True), bucket_cap_mb=0.03)
            handle = gw.attach(
                model,
                "qsgd:rounding=stochastic",
                error_feedback=feedback,
                options=gw.Options(seed=3, coalesce_bytes=coalesce),
            )
            train(model)
            name = f"attach qsgd feedback={feedback} coalesce={coalesce}"
            kept = handle.state_dict()["aggregators"]
            residuals = [kept[p][k] for p in sorted(kept) for k in sorted(kept[p])]
            sent = int(handle.stats()["wire_bytes"])
            digested = digest(residuals) if feedback else None
            found[name] = Found(digest(weights(model)), digested, [sent])
    return found


def sharded() -> nn.Module:
    model = Products(half=False)
    return fully_shard(model, mesh=dist.DeviceMesh.from_group(dist.group.WORLD, "cpu"))


def backend(rank: int) -> dict[str, Found]:
    """The results of the drop-in backend: for modules it finds, a registered one, flat buffers."""
    group: Any = dist.group.WORLD
    found = {}

    def note(name: str, model: nn.Module, registered: Any = None) -> None:
        before = group.stats()["wire_bytes"]
        train(model)
        after = (registered.handle if registered else group).stats()["wire_bytes"]
        sent = int(after - (0 if registered else before))
        found[name] = Found(digest(weights(model)), None, [sent])

    note("backend ddp", DDP(Products(half=True), bucket_cap_mb=0.03))
    note("backend fsdp", sharded())
    model = sharded()
    note(
        "backend fsdp registered",
        model,
        gw.register(model, "qsgd:rounding=stochastic:block=128", bits=8),
    )
    gw.register(blob=True, codec="qsgd:rounding=stochastic", bits=4)
    note("backend ddp blobs", DDP(Products(half=True), bucket_cap_mb=0.03))
    return found


def lines() -> dict[str, str]:
    """name -> line, for all runs."""
    old = os.environ.get("GRADWIRE_MIN_BYTES")
    os.environ["GRADWIRE_MIN_BYTES"] = "1000"
    try:
        texts = {}
        for body, of in ((attached, "gloo"), (backend, "gradwire")):
            ranks = as_processes(2, body, backend=of)
            for name in ranks[0]:
                texts[name] = line(name, [rank[name] for rank in ranks])
    finally:
        os.environ.pop("GRADWIRE_MIN_BYTES")
        if old is not None:
            os.environ["GRADWIRE_MIN_BYTES"] = old
    return texts
