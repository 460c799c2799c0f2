"""FSDP2 modules: exceptions in backward, reductions outside autograd, several meshes, and the
checkpoints of torch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_model import by_layer, replicated, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from ranks import caught, on, refuses
from training import Acts, alike, batch, nothing


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]


def test_dcp_takes_checkpoints_not_handles(rank: int, tmp_path: Path) -> None:
    for handle in (gw.attach(sharded()), gw.attach(DDP(nn.Linear(8, 8)))):
        for whole in (handle, Wrapped(handle)):
            save = partial(dcp.save, {"gradwire": whole}, checkpoint_id=tmp_path)
            refuses("handle.checkpoint()", save)
        state = handle.state_dict()
        given = {**state}, copy.deepcopy(state), state["aggregators"]
        for one, call in product(given, (dcp.save, dcp.async_save)):
            error = caught(lambda o=one, call=call: call({"gradwire": o}, checkpoint_id=tmp_path))
            assert "handle.checkpoint()" in str(error), error
        file = io.BytesIO()
        torch.save(given[1], file)
        file.seek(0)
        assert torch.load(file, weights_only=True) == state
        path = tmp_path / str(handle._reductions.what)
        app = Wrapped(handle, lambda h=handle: h.checkpoint())
        dcp.save({"gradwire": app}, checkpoint_id=path)
        handle.load_checkpoint(path, key="gradwire.handle")
        handle.detach()


class Wrapped:
    """As scripts do for their own classes."""

    def __init__(self, handle: Any, state: Callable[[], Any] | None = None) -> None:
        self.handle = handle
        self.state = state or handle.state_dict

    def state_dict(self) -> dict[str, Any]:
        return {"handle": self.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.handle.load_state_dict(state["handle"])


def loss(model: nn.Module, step: int, raises: bool = False) -> torch.Tensor:
    """With `raises`, backward raises between the two layers."""

    def fails() -> None:
        raise ValueError("a layer's own")

    model.between = fails if raises else nothing
    return model(batch(step)).square().sum()  # type: ignore[no-any-return]


OPTIONS: dict[str, Any] = {"bits": 4, "error_feedback": True}


@on(2)
@on(4, exhaustive=True)
def test_training_goes_on_after_an_exception(rank: int) -> None:
    """On one rank, or on all; also with weights of differences. Every rank has the same gradients
    afterwards, and numbers its steps alike."""
    everyone = list(range(dist.get_world_size()))
    of_weights = {"weights": {"*.weight": "randomshift:bits=8"}, "keep": "reference"}
    for more, raising in (({}, everyone[-1:]), (of_weights, everyone)):
        model, exact = by_layer(Acts()), by_layer(Acts())
        handle = gw.attach(model, **OPTIONS, **more)
        loss(model, 0).backward()
        handle.update(bits=8).wait()
        error = caught(loss(model, 0, rank in raising).backward)
        if rank in raising:  # a peer may be the first to raise
            assert isinstance(error, (ValueError, gw.TransportError)), error
        else:
            assert isinstance(error, gw.TransportError), error
            assert error.peer == raising[0]
            assert "backward raised an exception" in str(error)
            assert "reset_iter_state() and the handle's recover()" in str(error)
        model.reset_iter_state()
        handle.recover()
        for seed in range(3):
            for one in (model, exact):
                one.zero_grad()
                loss(one, seed).backward()
        assert handle.stats()["steps"] == 3
        assert alike(handle.state_dict()["steps"])
        for found, expected in zip(gradients(model), gradients(exact), strict=True):
            assert (found - expected).norm() < 0.5 * expected.norm()
        handle.detach()
        refuses("was detached", handle.recover)


def test_every_step_after_an_exception_raises(rank: int) -> None:
    """Until `recover`: FSDP2 itself leaves out gradients that it has not reduced then."""
    model = by_layer(Acts())
    handle = gw.attach(model, **OPTIONS)
    loss(model, 0).backward()
    assert isinstance(caught(loss(model, 0, True).backward), ValueError)
    for recovered in (2, 0):
        error = caught(loss(model, 0).backward)
        assert isinstance(error, gw.TransportError), error
        assert "reset_iter_state() and the handle's recover()" in str(error)
        if rank == recovered:  # the other one is as it was
            model.reset_iter_state()
        refuses("call the root module's reset_iter_state() first", handle.recover)
    model.reset_iter_state()
    handle.recover()
    loss(model, 0).backward()
    assert handle.stats()["steps"] == 1
    handle.detach()


def test_passes_outside_autograd_are_passes(rank: int) -> None:
    """Pipeline schedules run backward without reductions, and reduce behind it."""
    model = by_layer(Acts())
    handle = gw.attach(model, **OPTIONS)
    update = handle.update(bits=8)
    update.wait()
    handle.metrics(every=1)
    for step in range(1, 6):
        for module in (model.first, model.second, model):
            module.set_is_last_backward(False)
            module.set_reshard_after_backward(False)
            module.set_requires_gradient_sync(False)
        for part in range(2):
            loss(model, part).backward()
        for module in (model, model.second, model.first):
            module.set_is_last_backward(True)
            module.set_reshard_after_backward(True)
            module.set_requires_gradient_sync(True)
            state = module._get_fsdp_state()
            for group in state._fsdp_param_groups:
                group.post_backward()
        model._get_fsdp_state()._root_post_backward_final_callback()
        assert handle.stats()["steps"] == step
    assert update.in_force
    assert handle.metrics()["sampled_step"] > 1


class Experts(nn.Module):
    """Experts over a mesh of their own, as in a mixture."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.expert = nn.Linear(20, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(self.first(x).relu())  # type: ignore[no-any-return]


@on(4)
def test_modules_of_several_meshes_have_a_handle_each(rank: int) -> None:
    model = Experts()
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("other", "own"))
    fully_shard(model.expert, mesh=mesh["own"])
    fully_shard(model)
    refuses("attach to the inner modules of one group first", lambda: gw.attach(model))
    inner, outer = gw.attach(model.expert, **OPTIONS), gw.attach(model, **OPTIONS)
    for seed in range(2):
        model.zero_grad()
        loss(model, seed).backward()
    for handle in (inner, outer):
        assert handle.stats()["steps"] == 2
        assert handle.stats()["wire_bytes"] > 0
    refuses("already has a handle", lambda: gw.attach(model))
    outer.detach()
    inner.detach()


@on(4)
def test_errors_have_ranks_of_the_job(rank: int) -> None:
    """Rank 3 raises: its number is 1 in both of its groups."""
    model = by_layer(Acts(), mesh=replicated(2))
    handle = gw.attach(model, **OPTIONS)
    error = caught(loss(model, 0, rank == 3).backward)
    if rank != 3:  # rank 0 shares no group with it
        assert isinstance(error, gw.TransportError)
        assert f"rank {rank}: rank 3 has failed: rank 3: backward raised" in str(error)
        assert "see what rank 3 raised" in str(error)
    dist.barrier()
    handle.detach()


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.spare = nn.Linear(20, 64), nn.Linear(20, 64)

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        return self.used(x) + (self.spare(x) if spare else 0.0)  # type: ignore[no-any-return]


def test_unused_parameters_have_a_mend(rank: int) -> None:
    """The last of this file on two ranks: the group breaks."""
    model = fully_shard(Spare())
    model.set_reduce_scatter_unused_params(True)
    handle = gw.attach(model, bits=4)
    model(batch(0), rank == 0).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    handle.detach()
    model = fully_shard(Spare())
    gw.attach(model, bits=4)
    backward = model(batch(0), rank == 0).square().sum().backward
    refuses("set_reduce_scatter_unused_params(True)", backward)
