"""Replicas of a small model, and the same loop in float64 on one rank."""

from __future__ import annotations

import math
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
    rule: str = "nesterov",
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
            _apply(nets, theta, velocity, flying[1], lr, momentum, mix, rule)
    return [weights_of(one) for one in nets], theta


def _apply(
    nets: list[Net],
    theta: dict[str, torch.Tensor],
    velocity: dict[str, torch.Tensor],
    average: dict[str, torch.Tensor],
    lr: float,
    momentum: float,
    mix: float,
    rule: str,
) -> None:
    for n in average:
        velocity[n] = momentum * velocity[n] + average[n]
        step = average[n] + momentum * velocity[n]
        theta[n] = theta[n] - lr * (step.sign() if rule == "sign" else step)
        for one in nets:
            p = dict(one.named_parameters())[n].data
            p.copy_(mix * p + (1 - mix) * theta[n])


def dct_matrix(n: int) -> torch.Tensor:
    """The orthonormal DCT-II of n values."""
    k = torch.arange(n, dtype=F64)
    found = torch.cos(math.pi * k[:, None] * (2 * k + 1) / (2 * n)) * math.sqrt(2 / n)
    found[0] *= math.sqrt(0.5)
    return found


def demo_reference(
    ranks: int, steps: int, lr: float, beta: float, keep: int
) -> dict[str, torch.Tensor]:
    """The weights after DeMo's steps (2411.19870, Alg. 1) in float64: matrices of 64 x 64 by
    coefficients, in bf16; other weights by the sign of their mean."""
    nets = [net(width=64).to(F64) for _ in range(ranks)]
    theta, m = weights_of(nets[0]), dct_matrix(64)
    kept = [{n: torch.zeros_like(t) for n, t in theta.items()} for _ in range(ranks)]
    for step in range(steps):
        for rank, one in enumerate(nets):
            one.zero_grad()
            loss_of(one, rank, step).backward()
        for n in theta:
            total, senders = torch.zeros(2, *theta[n].shape, dtype=F64)
            for one, momentum in zip(nets, kept, strict=True):
                given = one.get_parameter(n).grad
                assert given is not None
                if theta[n].numel() != 4096:
                    total += given.bfloat16().double()
                    senders += 1
                    continue
                momentum[n] = beta * momentum[n] + given
                c = m @ momentum[n] @ m.T
                at = c.abs().view(-1).topk(keep).indices
                places = torch.zeros(4096, dtype=F64).index_fill_(0, at, 1.0).view(64, 64)
                sent = c.bfloat16().double() * places
                momentum[n] -= m.T @ sent @ m
                total, senders = total + sent, senders + places
            mean = total / senders.clamp(min=1)
            step_of = m.T @ mean @ m if theta[n].numel() == 4096 else mean
            theta[n] = theta[n] - lr * step_of.sign()
            for one in nets:
                one.get_parameter(n).data.copy_(theta[n])
    return theta
