"""Replicas of a small model, and the same loop in float64 on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

F64 = torch.float64


class Net(nn.Module):
    """Layers of one shape, between an embedding of inputs and a head."""

    def __init__(self, layers: int = 4, width: int = 72) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) / 4
        return self.head(x).squeeze(-1)  # type: ignore[no-any-return]


def net(seed: int = 0, **how: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**how)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], rank: int, step: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 5, generator=made)
    x = x.to(next(model.parameters()).dtype)  # type: ignore[attr-defined]
    return (model(x) - x.sum(1)).square().mean()


def sgd(model: nn.Module, lr: float = 0.02) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    replica: int,
    steps: range,
) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, replica, step).backward()
        optimizer.step()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def reference(
    ranks: int,
    steps: int,
    parts: list[list[str]],
    every: int,
    lr: float,
    momentum: float,
    delay: int = 0,
    mix: float = 0.0,
    present: Callable[[int], int] | None = None,
) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """The weights of every replica, and the outer weights, after SGD in float64 (2501.18512).

    Args:
        present: how many of the first replicas meet after a step; all unless given.
    """
    nets = [net().to(F64) for _ in range(ranks)]
    optimizers = [sgd(one) for one in nets]
    theta = weights_of(nets[0])
    velocity = {name: torch.zeros_like(t) for name, t in theta.items()}
    flying: tuple[int, dict[str, torch.Tensor]] | None = None
    for step in range(1, steps + 1):
        for rank, (one, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            train(one, optimizer, rank, range(step - 1, step))
        apart = every // len(parts)
        if step % apart == 0:
            names = parts[step % every // apart]
            among = nets if present is None else nets[: present(step)]
            now = [dict(one.named_parameters()) for one in among]
            average = {
                n: torch.stack([theta[n] - w[n].detach() for w in now]).mean(0) for n in names
            }
            flying = step, average
        if flying is not None and step == flying[0] + delay:
            _apply(nets, theta, velocity, flying[1], lr, momentum, mix)
    return [weights_of(one) for one in nets], theta


def _apply(
    nets: list[Net],
    theta: dict[str, torch.Tensor],
    velocity: dict[str, torch.Tensor],
    average: dict[str, torch.Tensor],
    lr: float,
    momentum: float,
    mix: float,
) -> None:
    for n in average:
        velocity[n] = momentum * velocity[n] + average[n]
        theta[n] = theta[n] - lr * (average[n] + momentum * velocity[n])
        for one in nets:
            p = dict(one.named_parameters())[n].data
            p.copy_(mix * p + (1 - mix) * theta[n])
