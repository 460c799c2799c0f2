"""PowerSGD with fp16 gradients under GradScaler (CGX 6.2.2 saw divergence)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from products import one_in
from ranks import as_processes

STEPS = 60
Trained = tuple[list[float], float, int]


def both(rank: int, codec: str, growth_interval: int) -> tuple[Trained, Trained]:
    return trained(rank, codec, growth_interval), trained(rank, None, growth_interval)


def trained(rank: int, codec: str | None, growth_interval: int) -> Trained:
    """Losses of a classifier in fp16; the last scale; how many steps were skipped."""
    torch.manual_seed(0)
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(512, 32, generator=made)
    labels = (inputs @ torch.randn(32, 10, generator=made)).argmax(1)
    mine = slice(rank * 256, rank * 256 + 256)
    layers = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    model = DDP(nn.Sequential(*layers).half())
    gw.attach(model, codec)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=growth_interval)
    losses, skipped = [], 0
    for _ in range(STEPS):
        logits = model(inputs[mine].half()).float()
        loss = nn.functional.cross_entropy(logits, labels[mine])
        model.zero_grad()
        scaler.scale(loss).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            assert p.grad is not None
            assert p.grad.dtype == torch.float16
            master.grad = p.grad.float()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        skipped += scaler.get_scale() < before
        losses.append(loss.item())
    return losses, float(scaler.get_scale()), skipped


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("codec", "growth_interval"),
    one_in(3, [("powersgd:rank=2", 10), ("powersgd:rank=4", 10), ("powersgd:rank=2", 50)]),
)
def test_it_trains_as_uncompressed(codec: str, growth_interval: int) -> None:
    """The first scale overflows, and it grows until it overflows again and again. The loss still
    falls by a tenth per step at the end, and a step skipped more or less depends on the CPU: ours
    may be a tenth of the steps behind."""
    (ours, scale, skipped), (theirs, plain_scale, _) = as_processes(
        2, both, codec, growth_interval
    )[0]
    assert skipped >= 2, "the scale never overflowed"
    assert all(map(math.isfinite, ours))
    assert ours[-1] < 0.3 * ours[0]
    assert ours[-1] < theirs[-1 - STEPS // 10]
    assert scale >= plain_scale / 16, "the scale collapsed"
