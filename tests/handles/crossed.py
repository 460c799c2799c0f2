"""Models, optimizers and scripts of cross-barrier training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from rooms.handles import LateStep, cross_barrier
from training import mlp

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, amsgrad=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
}


class Net(nn.Module):
    """Tied weights, a frozen layer, one that some steps leave out, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(20, 40)
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.norm = nn.BatchNorm1d(40)
        self.second = nn.Linear(40, 20)
        self.spare = nn.Linear(20, 20)
        self.third = nn.Linear(20, 40, bias=False)
        self.last = nn.Linear(20, 40, bias=False)
        self.last.weight = self.third.weight
        self.free = nn.Parameter(torch.ones(40))

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        x = self.second(self.norm(self.frozen(self.first(x).relu())))
        x = x + self.spare(x) if spare else x
        return self.last(self.second(self.third(x).relu())) * self.free


class Checkpointed(nn.Sequential):
    """Its backward runs the middle one's forward, in a backward of its own or not."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(*mlp(20, 40, 40, 20))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self[2], self[0](x).relu(), use_reentrant=self.reentrant)
        return self[4](x.relu())  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Weights go to functions of torch in lists."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(20, 20, 2)
        self.layer = nn.TransformerEncoderLayer(20, 2, 40, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.lstm(x[None])[0])  # type: ignore[no-any-return]


def convolution() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Unflatten(1, (5, 2, 2)), nn.Conv2d(5, 8, 2, padding=1), nn.Flatten()
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def compiled_inside() -> nn.Module:
    net = mlp(20, 60, 60, 20)
    net[4] = Doubled(60, 20)
    net[4].compile(backend="eager")
    return net


MODELS: dict[str, Callable[[], nn.Module]] = {
    "reentrant": lambda: Checkpointed(True),
    "checkpointed": lambda: Checkpointed(False),
    "recurrent": Recurrent,
    "convolution": convolution,
    "halves": lambda: mlp(20, 40, 20).bfloat16(),
    "static": lambda: mlp(20, 40, 40, 20),
    "compiled": lambda: mlp(20, 40, 20),
    "compiled inside": compiled_inside,
}


@contextmanager
def late() -> Iterator[mock.Mock]:
    """No average is there as the script steps; gives what counts late steps."""
    run = mock.Mock(side_effect=LateStep.run)
    with (
        mock.patch.object(cross_barrier, "_is_there", return_value=False),
        mock.patch.object(LateStep, "run", lambda *of: run(*of)),  # noqa: PLW0108  # binds `self`
    ):
        yield run


def inputs(step: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 20, generator=made)


def wrapped(net: nn.Module, script: str) -> DDP:
    torch._dynamo.config.optimize_ddp = False  # which refuses small buckets
    how: dict[str, Any] = {
        "bucket_cap_mb": 0.004,
        "gradient_as_bucket_view": "views" in script,
        "find_unused_parameters": "unused" in script,
        "static_graph": "static" in script,
    }
    return DDP(net, **how)


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))
