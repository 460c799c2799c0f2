"""Deep gradient compression with the optimiser's own momentum is refused, with the mend."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import _global_optimizer_pre_hooks

import gradwire as gw
from ranks import as_processes

pytestmark = pytest.mark.multiprocess


Made = Callable[[Any], torch.optim.Optimizer]


def model_of() -> DDP:
    torch.manual_seed(0)
    return DDP(nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 4)))


def backward(model: DDP, rank: int) -> None:
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()


def steps(model: DDP, optimizer: torch.optim.Optimizer, rank: int) -> str:
    """What the first step raises; "" if it steps."""
    backward(model, rank)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        optimizer.step()
    except gw.ConfigError as error:
        assert all(map(torch.equal, before, model.parameters())), "it has changed a parameter"
        assert not optimizer.state
        return str(error)
    assert not all(map(torch.equal, before, model.parameters()))
    return ""


def test_one_with_momentum_is_refused_before_it_changes_anything(rank: int) -> None:
    kinds: dict[str, Made] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
        "adamw without": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.0, 0.99)),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
        "second group": lambda p: torch.optim.SGD(
            [{"params": list(p)[:1]}, {"params": list(p)[2:], "momentum": 0.8}], lr=0.1
        ),
        "biases alone": lambda p: torch.optim.SGD(list(p)[1:2], lr=0.1, momentum=0.9),
    }
    found = {}
    for kind, made in kinds.items():
        model = model_of()
        handle = gw.attach(model, "dgc", density=0.1, coalesce_bytes=0)
        found[kind] = steps(model, made(list(model.parameters())), rank)
        handle.detach()
    assert not _global_optimizer_pre_hooks
    assert found["sgd"] == found["adamw without"] == found["biases alone"] == ""
    assert found["momentum"].startswith(
        "SGD has momentum=0.9 for parameter 0.weight, whose average, by "
        "dgc(density=0.1, momentum=0.9, values=fp16), includes momentum already: make the "
        "optimizer with momentum=0, or attach with momentum=0"
    )
    assert "AdamW has betas=(0.9, 0.999)" in found["adamw"]
    assert "make the optimizer with betas=(0.0, 0.999)" in found["adamw"]
    assert "RMSprop has momentum=0.5" in found["rmsprop"]
    assert "momentum=0.8 for parameter 1.weight" in found["second group"]


def test_those_made_before_are_seen_updates_followed_and_detach_ends_it(rank: int) -> None:
    model, other = model_of(), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    apart = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    handle = gw.attach(model, "dgc", density=0.1)
    other(torch.ones(3)).sum().backward()
    apart.step()  # holds no attached parameter
    found = [steps(model, optimizer, rank)]
    optimizer.param_groups[0]["momentum"] = 0
    found.append(steps(model, optimizer, rank))
    optimizer.param_groups[0]["momentum"] = 0.5  # as a scheduler may
    found.append(steps(model, optimizer, rank))
    handle.update(momentum=0).wait()
    for _ in range(4):
        backward(model, rank)
    assert handle.plan.version == 1
    assert not _global_optimizer_pre_hooks
    found.append(steps(model, optimizer, rank))
    handle.update(momentum=0.9).wait()
    for _ in range(4):
        backward(model, rank)
    assert handle.plan.version == 2
    optimizer.state.clear()
    found.append(steps(model, optimizer, rank))
    handle.detach()
    found.append(steps(model, optimizer, rank))
    assert [bool(error) for error in found] == [True, False, True, False, True, False]


def cost(rank: int) -> float:
    model = model_of()
    gw.attach(model, "dgc", density=0.1)
    (hook,) = _global_optimizer_pre_hooks.values()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook(optimizer, (), {})
    begun = time.perf_counter()
    for _ in range(1000):
        hook(optimizer, (), {})
    return (time.perf_counter() - begun) / 1000


@pytest.mark.timing
def test_it_costs_microseconds_per_step() -> None:
    assert max(as_processes(1, cost)) < 200e-6
