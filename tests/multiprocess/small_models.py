"""Small models and their training, for tests of the backend, as in a script for gloo."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from training import flat


def mlp(width: int = 60) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.LayerNorm(width), nn.Linear(width, 30))


def strayed(model: nn.Module, reference: nn.Module, start: nn.Module) -> float:
    """The distance from the reference weights, relative to their change in training."""
    way = (flat(reference) - flat(start)).norm()
    return float((flat(model) - flat(reference)).norm() / way)


def gloo() -> Any:
    """A gloo group of all ranks."""
    return dist.new_group(backend="gloo")


def group() -> Any:
    """The default group: the backend's."""
    return dist.group.WORLD


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


def sharded(model: nn.Module, of: Any = None, **options: Any) -> nn.Module:
    """`model` under FSDP2, its layers one by one."""
    mesh = dist.DeviceMesh.from_group(of or group(), "cpu")
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)
