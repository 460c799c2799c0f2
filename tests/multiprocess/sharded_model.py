"""A model under FSDP2 with many kinds of parameters, for tests of `gw.attach`."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Model(nn.Module):
    """Tied weights, a frozen layer, a parameter unused in some steps, few rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(5, 30))  # fewer rows than some world sizes
        self.first = nn.Linear(30, 67)
        self.frozen = nn.Linear(67, 67).requires_grad_(False)
        self.second = nn.Linear(67, 30)
        self.spare = nn.Linear(30, 30)
        self.again = nn.Linear(30, 5, bias=False)
        self.again.weight = self.embedding  # both in the root's group

    def forward(self, x: torch.Tensor, spare: bool = False, detached: bool = False) -> torch.Tensor:
        x = x @ self.embedding.T @ self.embedding
        x = self.second(self.frozen(self.first(x).relu()).relu())
        if spare:
            x = x + self.spare(x)
        return self.again(x)


def sharded(policy: MixedPrecisionPolicy | None = None, **options: Any) -> Model:
    model = Model()
    how = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), **options}
    if policy is not None:
        how["mp_policy"] = policy
    for module in (model.first, model.frozen, model.spare, model):
        fully_shard(module, **how)
    return model


def batch(step: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 30, generator=made)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Each parameter's, of this rank's shard."""
    return {
        name: None if p.grad is None else p.grad.to_local().clone()
        for name, p in model.named_parameters()
    }


def backward(model: nn.Module, step: int, spare: bool = False) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    model(batch(step), spare=spare).square().mean().backward()
    return gradients(model)


def same(a: Any, b: Any) -> bool:
    return (a is None and b is None) or torch.equal(a, b)


def dumped(state: Any) -> bytes:
    """A copy: a tensor shared by a process does not outlive it."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def loaded(state: bytes) -> Any:
    return torch.load(io.BytesIO(state))
