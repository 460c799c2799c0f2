"""Small models, and training of them on the ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard


def mlp(*widths: int, seed: int = 0, between: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers, and one `between` each two: parameters 0.weight, 0.bias, 2.weight, ..."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), between()]
    return nn.Sequential(*layers[:-1])


def sharded(model: Any) -> Any:
    """`model` under FSDP2, over all ranks."""
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def batch(step: int, size: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Inputs of 20 values, of each step and rank its own."""
    made = torch.Generator().manual_seed(step * 100 + dist.get_rank())
    return torch.randn(size, 20, generator=made).to(dtype)


def backward(model: Any, x: torch.Tensor) -> None:
    """Fill in the gradients anew."""
    for p in model.parameters():
        p.grad = None
    model(x).float().square().mean().backward()


def train(
    model: Any, steps: range, dtype: torch.dtype = torch.float32, clip: float | None = None
) -> None:
    """By SGD; `clip`: the largest norm of the gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        backward(model, batch(step, dtype=dtype))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def whole(tensor: Any) -> torch.Tensor:
    """Of a shard, the tensor."""
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def flat(*models: nn.Module) -> torch.Tensor:
    """All parameters."""
    parameters = [p for model in models for p in model.parameters()]
    return torch.cat([whole(p.detach()).float().reshape(-1) for p in parameters])


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def everywhere(value: Any) -> list[Any]:
    """The values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def alike(value: Any) -> bool:
    """Whether all ranks have the same value, which is no tensor."""
    return all(other == value for other in everywhere(value))


def same_everywhere(tensor: torch.Tensor) -> bool:
    return all(torch.equal(tensor, other) for other in everywhere(tensor))


class Branches(nn.Module):
    """Uses one of two layers per step, so that the other has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.head = nn.Linear(20, 60), nn.Linear(20, 60), nn.Linear(60, 30)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.head(self.left(x) if left else self.right(x))


class BareFSDP1(FSDP1):
    """Its own constructor needs a GPU."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class OnTheWayBack(torch.autograd.Function):
    """The identity, with an action in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, action: Callable[[], object]) -> torch.Tensor:
        ctx.action = action
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.action()
        return grads[0], None


class Acts(nn.Module):
    """Two layers, with an action behind and between them in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 300), nn.Linear(300, 300)
        self.behind: Callable[[], object] = nothing
        self.between: Callable[[], object] = nothing

    def forward(self, x: torch.Tensor) -> Any:
        x = OnTheWayBack.apply(self.first(x), self.between)  # type: ignore[no-untyped-call]
        return OnTheWayBack.apply(self.second(x), self.behind)  # type: ignore[no-untyped-call]


def nothing() -> None:
    pass
