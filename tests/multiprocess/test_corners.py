"""Corner cases of FSDP2 and the backend: each of these once failed where plain torch works."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from ranks import caught, on, raises, refuses
from training import whole


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def two(rows: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, rows))


def step(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.full((1, 8), 1.0 + dist.get_rank())).sum().backward()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [whole(p.grad).clone() for p in model.parameters()]


def as_plain(ours: nn.Module, plain: nn.Module, steps: int = 3) -> None:
    for _ in range(steps):
        step(ours)
        step(plain)
        for mine, known in zip(gradients(ours), gradients(plain), strict=True):
            assert torch.allclose(mine, known, rtol=1e-6)


# ---- gw.attach, over gloo


@on(4)
def test_shards_without_rows(rank: int) -> None:
    """HSDP; a weight of one row, so that the second shard is empty."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    ours, plain = fully_shard(two(1), mesh=mesh), fully_shard(two(1), mesh=mesh)
    gw.attach(ours, "identity")
    as_plain(ours, plain)


def an_error_between_replicas(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    model = fully_shard(nn.Linear(8, 8), mesh=mesh)
    gw.attach(model, "identity")
    out = model(torch.ones(1, 8))
    if rank == 1:
        out.register_hook(lambda _: 1 / 0)
    error = raises((gw.TransportError, ZeroDivisionError)[rank], out.sum().backward)
    assert rank == 1 or "rank 1 has failed" in str(error)


def test_groups_of_several_modules(rank: int) -> None:
    """`fully_shard([a, b])` has one group of parameters: detached once, it is free."""
    model = two()
    fully_shard([model[0], model[1]], mesh=line())
    fully_shard(model, mesh=line())
    handle = gw.attach(model, "qsgd", bits=2)
    assert len(handle.plan.parameters) == 4
    step(model)
    calls = handle.stats()["calls"]
    handle.detach()
    step(model)
    assert handle.stats()["calls"] == calls
    gw.attach(model).detach()


def test_other_reduce_dtypes(rank: int) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    ours, plain = (fully_shard(two(), mesh=line(), mp_policy=policy) for _ in range(2))
    gw.attach(ours, "qsgd", error_feedback=True)
    as_plain(ours, plain)


def test_updates_without_rows(rank: int) -> None:
    """Some ranks exchange no message; still all switch."""
    model = fully_shard(nn.Linear(8, 1), mesh=line())
    handle = gw.attach(model, "qsgd")
    update = handle.update(bits=2)
    update.wait(60)
    for _ in range(8):
        step(model)
    assert update.in_force


def test_passes_without_sync(rank: int) -> None:
    """An exception in a backward that reduces nothing does not affect peers."""
    model = fully_shard(two(), mesh=line())
    if not hasattr(model, "reset_iter_state"):
        return  # before torch 2.13 FSDP2 does not go on after an exception
    gw.attach(model, "identity")
    model.set_requires_gradient_sync(False)
    out = model(torch.ones(1, 8))
    out.register_hook(lambda _: 1 / 0)
    assert isinstance(caught(out.sum().backward), ZeroDivisionError)
    model.set_requires_gradient_sync(True)
    model.reset_iter_state()
    step(model)


def test_padding_is_zero(rank: int) -> None:
    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
    model = fully_shard(nn.Linear(8, 3, bias=False), mesh=line())
    seen: list[torch.Tensor] = []
    model.set_all_reduce_hook(lambda values: seen.append(values.clone()))
    gw.attach(model, "identity")
    step(model)
    assert bool(seen[0].isfinite().all())
    assert bool((seen[0][8 * (2 - rank) :] == 0).all())
    torch.use_deterministic_algorithms(False)


def test_one_rank_is_warned(rank: int) -> None:
    """A residual loaded by a single rank, whose FSDP2 reduces nothing."""
    model = fully_shard(nn.Linear(8, 8), mesh=line())
    handle = gw.attach(model, "topk", density=0.1, error_feedback=True)
    step(model)
    states: list[Any] = [None, None]
    dist.all_gather_object(states, handle.state_dict())
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    other = fully_shard(nn.Linear(8, 8), mesh=DeviceMesh.from_group(alone, "cpu"))
    single = gw.attach(other, "topk", density=0.1, error_feedback=True)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        single.load_state_dict(states)
    assert ["are dropped" in str(w.message) for w in found] == [True]
    assert not single.state_dict()["aggregators"]
    wrong = {**states[0], "rank": 99}
    refuses("rank 99 of 2", lambda: handle.load_state_dict(wrong))


def test_algorithms_change_by_name(rank: int) -> None:
    model = DDP(two())
    options = gw.Options(algorithm="hierarchical", nodes=(0, 1))
    handle = gw.attach(model, "qsgd", options=options)
    handle.update(algorithm="ring").wait(60)
    for _ in range(4):
        step(model)
    assert handle.plan.options.algorithm == "ring"


# ---- scripts that only name the backend

over_the_backend = on(2, backend="gradwire")


@over_the_backend
def test_parts_over_two_groups(rank: int) -> None:
    groups = [dist.new_group(), dist.new_group()]
    meshes = [DeviceMesh.from_group(group, "cpu") for group in groups]
    model = two()
    fully_shard(model[0], mesh=meshes[0])
    fully_shard(model, mesh=meshes[1])
    step(model)
    assert all(group.models.handles for group in groups)  # type: ignore[attr-defined]


@over_the_backend
def test_a_part_of_its_own(rank: int) -> None:
    model = two()
    fully_shard(model[0], mesh=line())
    fully_shard(model, mesh=line())
    registration = gw.register(model[0], bits=8)
    step(model)
    step(model)
    assert [p.name for p in registration.handle.plan.parameters] == ["weight", "bias"]


@over_the_backend
def test_thawed_later(rank: int) -> None:
    model = fully_shard(two(), mesh=line())
    model[0].requires_grad_(False)
    step(model)
    model[0].requires_grad_(True)
    step(model)
    assert gradients(model)[0].norm() > 0


@over_the_backend
def test_replicated(rank: int) -> None:
    if "mesh" in inspect.signature(replicate).parameters:
        ours = replicate(two(), mesh=line())
    else:  # torch 2.9
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=names)
        ours = replicate(two(), device_mesh=mesh)
    step(ours)
    torch.testing.assert_close(gradients(ours)[3], torch.ones(8))


@over_the_backend
def test_a_forward_by_itself(rank: int) -> None:
    model = DDP(two())
    if rank == 0:
        model(torch.ones(1, 8))
    dist.barrier()
    step(model)
    group: Any = dist.group.WORLD
    assert model in group.models.handles


@over_the_backend
def test_a_reduce_scatter_of_its_own(rank: int) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    class Own(DefaultReduceScatter):
        calls = 0

        def __call__(self, *args: Any, **named: Any) -> Any:
            Own.calls += 1
            return super().__call__(*args, **named)

    model = fully_shard(two(), mesh=line())
    model.set_custom_reduce_scatter(Own())
    step(model)
    assert Own.calls == 1
    refuses("a custom reduce-scatter, Own", lambda: gw.attach(model))
