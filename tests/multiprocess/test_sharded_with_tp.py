"""Tensor parallelism in one dimension of a mesh, FSDP2 in the other: 2 x 2 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_model import assert_as_asked, gradients
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import gradwire as gw
from ranks import on

TIED = "embedding.weight"
COMPRESSED = {TIED, "up.weight", "down.weight", "frozen.weight", "spare.weight"}


class Model(nn.Module):
    """Tied weights, a frozen layer, an unused one, an excluded one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.excluded = nn.Linear(32, 32)
        self.spare = nn.Linear(32, 32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.down(self.up(x).relu())
        return self.head(self.excluded(self.frozen(x)).tanh())


def parallel(mesh: DeviceMesh) -> Model:
    model = Model()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in (model.up, model.spare, model):
        fully_shard(module, mesh=mesh["dp"])
    return model


def backward(model: nn.Module, mesh: DeviceMesh, step: int) -> dict[str, Any]:
    """The gradients of this rank's shards; ranks of one row have the same batch."""
    model.zero_grad()
    made = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
    tokens = torch.randint(0, 50, (4, 6), generator=made)
    model(tokens).square().mean().backward()
    return gradients(model)


@on(4, True)
@on(4, False, backend="gradwire")
def test_gradients_are_exact_or_near(rank: int, attached: bool) -> None:
    names = {"mesh_dim_names": ("dp", "tp")}
    plainly = {"backend_override": {"dp": "gloo", "tp": "gloo"}}
    beside = init_device_mesh("cpu", (2, 2), **names, **plainly)
    mesh = beside if attached else init_device_mesh("cpu", (2, 2), **names)
    plain, ours = parallel(beside), parallel(mesh)
    handle = None
    if attached:
        handle = gw.attach(ours, bits=4, exclude=["excluded.*"])
    else:
        handle = gw.register(ours, bits=4, exclude=["excluded.*"]).handle
    assert handle is not None
    told = handle.stats()["parameters"]
    assert {name for name, facts in told.items() if facts["codec"] != "dense"} == COMPRESSED
    for step in range(2):
        expected, found = backward(plain, beside, step), backward(ours, mesh, step)
        assert_as_asked(expected, found, COMPRESSED, near=0.2)
        assert expected["spare.weight"] is None
        assert expected["frozen.weight"] is None
    if not attached:
        group: Any = mesh["tp"].get_group()
        assert dist.get_backend(group) == "gradwire"
        assert group.stats()["calls"] == 0
        assert group.stats()["left_alone"], "tensor parallelism sent nothing"


@on(4)
def test_checkpoints_have_the_residuals_of_all_columns(rank: int, tmp_path: Path) -> None:
    """Each column of the mesh has a handle with a rank 0: none replaces another's residuals."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def made() -> tuple[Model, Any]:
        model = parallel(mesh)
        return model, gw.attach(model, "qsgd:bits=4", error_feedback=True)

    model, handle = made()
    backward(model, mesh, 0)
    dcp.save({"gradwire": handle.checkpoint()}, checkpoint_id=tmp_path)
    _, resumed = made()
    resumed.load_checkpoint(tmp_path)
    saved, loaded = (h.state_dict()["aggregators"] for h in (handle, resumed))
    assert saved
    for name, kept in saved.items():
        assert torch.equal(loaded[name]["residual"], kept["residual"]), name
