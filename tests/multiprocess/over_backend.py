"""Small models over the backend, and a twin over gloo beside, as in a script for gloo."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from ranks import on
from training import flat, train

ENVIRONMENT = {"GRADWIRE_MIN_BYTES": "4000"}
BLOBS = {**ENVIRONMENT, "GRADWIRE_BLOB": "1"}


def over(environment: dict[str, str], *rows: Any) -> Any:
    """A test over the backend, on two ranks and more."""

    def marked(test: Any) -> Any:
        how: dict[str, Any] = {"backend": "gradwire", "environment": environment}
        return on(2, *rows, **how)(on(4, *rows, exhaustive=True, **how)(test))

    return marked


by_parameter, in_blobs = over(ENVIRONMENT), over(BLOBS)


def gloo() -> Any:
    """A gloo group of all ranks."""
    return dist.new_group(backend="gloo")


def group() -> Any:
    """The default group: the backend's."""
    return dist.group.WORLD


def is_blob() -> bool:
    return bool(group().settings.blob)


@contextlib.contextmanager
def setting(**changes: Any) -> Iterator[Any]:
    """A group with other environment variables."""
    old = dict(os.environ)
    os.environ.update(changes)
    made = dist.new_group(backend="gradwire")
    os.environ.clear()
    os.environ.update(old)
    yield made
    dist.destroy_process_group(made)


# ---- models


def mlp(width: int = 60) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.LayerNorm(width), nn.Linear(width, 30))


def in_ddp(model: nn.Module, of: Any) -> DDP:
    return DDP(model, process_group=of)


def sharded(model: nn.Module, of: Any = None, **options: Any) -> nn.Module:
    """`model` under FSDP2, its layers one by one."""
    mesh = dist.DeviceMesh.from_group(of or group(), "cpu")
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


# ---- what they send, and how they train


class Sent:
    """Calls and bytes that a group has compressed since."""

    def __init__(self, of: Any = None) -> None:
        self.group = of or group()
        self.before = self.group.stats()

    def __getattr__(self, name: str) -> int:
        return int(self.group.stats()[name] - self.before[name])

    @property
    def ratio(self) -> float:
        return self.raw_bytes / self.wire_bytes


def beside(
    model: nn.Module, reference: nn.Module, steps: int = 3, of: Any = None
) -> tuple[Sent, float]:
    """Train both; what a group has sent then, and the distance between their weights, relative to
    their change."""
    sent, start = Sent(of), flat(reference)
    train(model, range(steps))
    train(reference, range(steps))
    end = flat(reference).double()
    return sent, float((flat(model) - end).norm() / (end - start).norm())
