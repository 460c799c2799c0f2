"""FSDP2 modules: exceptions in backward, reductions outside autograd, several meshes, groups of
several modules, and the checkpoints of torch."""

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
from scenario import by_layer, replicated, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from ranks import caught, on, raises, refuses
from training import Acts, Branches, alike, batch, mlp, nothing, whole


def test_dcp_takes_checkpoints_not_handles(rank: int, tmp_path: Path) -> None:
    for handle in (gw.attach(sharded()), gw.attach(DDP(nn.Linear(8, 8)))):
        for saved in (handle, Wrapped(handle)):
            save = partial(dcp.save, {"gradwire": saved}, checkpoint_id=tmp_path)
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
        handle.load(path, key="gradwire.handle")
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


def loss(model: nn.Module, step: int, breaks: bool = False) -> torch.Tensor:
    """With `breaks`, backward raises between the two layers."""

    def fails() -> None:
        raise ValueError("a layer's own")

    model.between = fails if breaks else nothing
    return model(batch(step)).square().sum()  # type: ignore[no-any-return]


OPTIONS: dict[str, Any] = {"bits": 4, "error_feedback": True}


@on(2)
@on(4, exhaustive=True)
def test_training_goes_on_after_an_exception(rank: int) -> None:
    """On one rank, or on all; also with weights of differences. Every step raises until
    `recover`; then every rank has the same gradients, and numbers its steps alike."""
    everyone = list(range(dist.get_world_size()))
    kept = gw.Options(keep="reference")
    of_weights = {"weights": {"*.weight": "randomshift:bits=8"}, "options": kept}
    for more, raising in (({}, everyone[-1:]), ({}, everyone), (of_weights, everyone)):
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
        for _ in range(3 * (raising == everyone and not more)):
            # FSDP2 itself leaves out gradients that it has not reduced then.
            said = "reset_iter_state() and the handle's recover()"
            raises(gw.TransportError, loss(model, 0).backward, said)
        model.reset_iter_state()
        handle.recover()
        for seed in range(3):
            for one in (model, exact):
                one.zero_grad()
                loss(one, seed).backward()
        assert handle.stats()["steps"] == 3
        assert alike(handle.state_dict()["steps"])
        for ours, torchs in zip(model.parameters(), exact.parameters(), strict=True):
            found, expected = whole(ours.grad), whole(torchs.grad)
            assert (found - expected).norm() < 0.5 * expected.norm()
        handle.detach()
        refuses("was detached", handle.recover)


@on(2)
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


@on(4)
def test_modules_of_several_meshes_have_a_handle_each(rank: int) -> None:
    """As of experts in a mixture, over a mesh of their own."""
    model = Acts()
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("other", "own"))
    fully_shard(model.second, mesh=mesh["own"])
    fully_shard(model)
    refuses("attach to the inner modules of one group first", lambda: gw.attach(model))
    inner, outer = gw.attach(model.second, **OPTIONS), gw.attach(model, **OPTIONS)
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


def test_a_backward_without_sync_may_raise(rank: int) -> None:
    """It reduces nothing, so peers do not notice."""
    model = by_layer(Acts())
    if not hasattr(model, "reset_iter_state"):
        return  # before torch 2.13 FSDP2 does not go on after an exception
    handle = gw.attach(model, **OPTIONS)
    model.set_requires_gradient_sync(False)
    assert isinstance(caught(loss(model, 0, rank == 1).backward), (ValueError, type(None)))
    model.set_requires_gradient_sync(True)
    model.reset_iter_state()
    loss(model, 0).backward()
    handle.detach()


def test_groups_of_several_modules_and_padding(rank: int) -> None:
    """`fully_shard([a, b])` has one group of parameters: detached once, it is free."""
    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
    model = mlp(20, 8, 3)
    fully_shard([model[0], model[2]])
    fully_shard(model)
    seen: list[torch.Tensor] = []
    model[0].set_all_reduce_hook(lambda values: seen.append(values.clone()))
    handle = gw.attach(model, "identity")
    assert len(handle.plan.parameters) == 4
    for calls in (1, 1):
        model(batch(0)).square().sum().backward()
        assert handle.stats()["calls"] == calls
        handle.detach()
    torch.use_deterministic_algorithms(False)
    gw.attach(model).detach()
    assert seen[0].isfinite().all()
    # 4 rows of 20 and 4 values; of 3 rows of 8, and of 3 values, rank 1 has one less.
    assert rank == 0 or not seen[0][[*range(84 + 8, 84 + 16), -1]].any()


def test_algorithms_change_by_name(rank: int) -> None:
    model = DDP(mlp(20, 8))
    options = gw.Options(algorithm="hierarchical", nodes=(0, 1))
    handle = gw.attach(model, "qsgd", options=options)
    handle.update(options=gw.Options(algorithm="ring")).wait(60)
    for step in range(4):
        model(batch(step)).square().sum().backward()
    assert handle.plan.options.algorithm == "ring"


def test_unused_parameters_have_a_mend(rank: int) -> None:
    """The last of this file on two ranks: the group breaks."""
    model = fully_shard(Branches())
    model.set_reduce_scatter_unused_params(True)
    handle = gw.attach(model, bits=4)
    model(batch(0), rank == 0).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    handle.detach()
    model = fully_shard(Branches())
    gw.attach(model, bits=4)
    backward = model(batch(0), rank == 0).square().sum().backward
    refuses("set_reduce_scatter_unused_params(True)", backward)
