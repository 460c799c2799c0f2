"""The backend "gradwire": modules that are registered, or that it finds by itself; groups that are
made, split, aborted and destroyed, waits with a timeout, and a wrong environment.

tests/multiprocess/test_faults.py has ranks that fail under it.
"""

from __future__ import annotations

import inspect
import os
import runpy
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from over_backend import ENVIRONMENT, by_parameter, gloo, group, mlp, sharded
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from products import EXHAUSTIVE
from ranks import as_processes, caught, on, raises, refuses
from training import mlp as linear
from training import train, whole

# ---- modules


class Trainer(nn.Module):
    """A framework's module around the user's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(30, 30))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ self.scale


@by_parameter
def test_a_registered_part_of_what_ddp_wraps(rank: int) -> None:
    bare = mlp()
    how = {"bits": 2, "error_feedback": True, "options": gw.Options(coalesce_bytes=0)}
    registration = gw.register(bare, codecs={"3.weight": "terngrad"}, **how)
    model = DDP(Trainer(bare))
    train(model, range(2))
    assert registration.handle is not None
    stats = registration.handle.stats()
    codecs = {name: p["codec"] for name, p in stats["parameters"].items()}
    assert codecs.pop("inner.0.weight") == "qsgd:bits=2"
    assert codecs.pop("inner.3.weight") == "terngrad:form=minmax"
    assert set(codecs.values()) == {"none"}
    assert stats["residual_bytes"] == 4 * (20 * 60 + 60 * 30)


def two() -> Any:
    return linear(8, 8, 8)


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def step(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.full((1, 8), 1.0 + dist.get_rank())).sum().backward()
    return [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]


class OwnReduceScatter(DefaultReduceScatter):
    calls = 0

    def __call__(self, *args: Any, **named: Any) -> Any:
        OwnReduceScatter.calls += 1
        return super().__call__(*args, **named)


@by_parameter
def test_modules_where_only_the_backend_once_failed(rank: int) -> None:
    groups, model = [dist.new_group(), dist.new_group()], two()
    fully_shard(model[0], mesh=DeviceMesh.from_group(groups[0], "cpu"))
    fully_shard(model, mesh=DeviceMesh.from_group(groups[1], "cpu"))
    step(model)
    assert all(of.models.handles for of in groups), "parts over two groups"  # type: ignore[attr-defined]

    model = two()
    fully_shard(model[0], mesh=line())
    fully_shard(model, mesh=line())
    registration = gw.register(model[0], bits=8)
    step(model)
    step(model)
    names = [p.name for p in registration.handle.plan.parameters]
    assert names == ["weight", "bias"], "a part of its own"

    model = fully_shard(two(), mesh=line())
    model[0].requires_grad_(False)
    step(model)
    model[0].requires_grad_(True)
    step(model)
    assert step(model)[0].norm() > 0, "thawed later"

    if "mesh" in inspect.signature(replicate).parameters:
        ours = replicate(two(), mesh=line())
    else:  # torch 2.9
        mesh = init_device_mesh(
            "cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard")
        )
        ours = replicate(two(), device_mesh=mesh)
    torch.testing.assert_close(step(ours)[3], torch.ones(8))

    model = DDP(two())
    if rank == 0:
        model(torch.ones(1, 8))  # by itself
    dist.barrier()
    step(model)
    assert model in group().models.handles

    model = fully_shard(two(), mesh=line())
    model.set_custom_reduce_scatter(OwnReduceScatter())
    step(model)
    assert OwnReduceScatter.calls == 1
    refuses("a custom reduce-scatter, OwnReduceScatter", lambda: gw.attach(model))


@by_parameter
def test_wrong_use_is_named(rank: int) -> None:
    unlike = 4 + rank % 2
    for said, call in (
        ("gloo", lambda: gw.register(DDP(mlp(), process_group=gloo()))),
        ("gloo", lambda: gw.register(sharded(mlp(), gloo()))),
        ("algorithm", lambda: gw.register(sharded(mlp()), options=gw.Options(algorithm="ring"))),
        (
            "coalesce_bytes",
            lambda: gw.register(sharded(mlp()), options=gw.Options(coalesce_bytes=0)),
        ),
        ("nobody", lambda: gw.register(mlp(), exclude=["nobody"])),
        ("nothing", lambda: gw.register(mlp(), "nothing")),
        ("0.weight", lambda: gw.register(DDP(mlp()), bits=unlike)),
        ("0.weight", lambda: gw.register(sharded(mlp()), bits=unlike)),
    ):
        refuses(said, call)
    for wrong in (1, 0):  # the rank with an invalid value; every rank gets the error
        os.environ["GRADWIRE_MIN_BYTES"] = "many" if rank == wrong else "4000"
        refuses("GRADWIRE_MIN_BYTES='many'", lambda: dist.new_group(backend="gradwire"))
    os.environ["GRADWIRE_MIN_BYTES"] = str(4000 + rank)
    said = refuses("GRADWIRE_MIN_BYTES 4001", lambda: dist.new_group(backend="gradwire"))
    assert "rank 1" in said
    os.environ.update(ENVIRONMENT)


# ---- groups


@by_parameter
def test_split_groups_are_of_the_backend(rank: int) -> None:
    """torch only splits groups of accelerators; the group's own method works on the CPU."""
    child = group().split_group([0, 1], group_name="a pair", group_desc="split")
    assert (child is None) == (rank > 1)
    if child is not None:
        assert (type(child), child.size(), child.group_name) == (type(group()), 2, "a pair")
        assert child.settings == group().settings
        tensor = torch.full((3,), float(rank + 1))
        child.allreduce([tensor]).wait()
        assert tensor.tolist() == [3.0] * 3
        gw.all_reduce(tensor, "identity", group=child)
    gw.all_reduce(torch.ones(3), "identity")  # first use of another group's engine, perhaps
    if child is not None:
        gw.all_reduce(tensor, "identity", group=child)
        assert tensor.tolist() == [12.0] * 3
        child.shutdown()
    dist.barrier()


@on(2, backend="gradwire", timeout=100.0, environment={"GRADWIRE_BLOB": "1"})
def test_waits_end_by_a_timeout_or_an_abort(rank: int) -> None:
    """Rank 1 is late: a wait with a timeout fails, a wait without one succeeds; and at the end, one
    gets an error by the abort of its group."""
    x = torch.zeros(100_000, requires_grad=True)
    works: list[dist.Work] = []
    x.register_hook(lambda g: works.append(dist.all_reduce(g.clone(), async_op=True)))
    x.sum().backward()  # every rank's engine is made here
    works.pop().wait()
    store = dist.distributed_c10d._get_default_store().clone()
    if rank == 1:
        store.wait(["timed out"])
    x.sum().backward()
    work = works.pop()
    if rank == 0:
        raises(gw.TransportError, lambda: work.wait(timedelta(seconds=0.3)), "0.3 s")
        assert not work.is_completed()
        store.set("timed out", b"")
    assert work.wait(timedelta(seconds=100))
    assert work.get_future().wait()[0].eq(dist.get_world_size()).all()
    if rank == 1:
        store.wait(["aborted"])
        return
    x.sum().backward()
    dist.distributed_c10d._abort_process_group()
    error = caught(works.pop().wait)
    store.set("aborted", b"")
    assert isinstance(error, gw.TransportError)
    assert "destroyed" in str(error)


@on(2, backend="gradwire")
def test_destroyed_and_made_again(rank: int) -> None:
    """By each spelling, over one store; resources are released. Equal names and numbers of calls
    give equal random numbers."""
    size, store = dist.get_world_size(), dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    norms = []
    for name in (*["gradwire"] * 3, "cpu:gradwire", "cpu:gradwire,cuda:gradwire", "GRADWIRE"):
        dist.init_process_group(name, rank=rank, world_size=size, store=store)
        assert group().name() == "gradwire"
        assert "cpu" in [device.type for device in group()._device_types]
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 3
        model = DDP(linear(100, 300, 100))
        model(torch.randn(4, 100)).square().sum().backward()
        norms.append(float(sum(p.grad.double().sum() for p in model.parameters())))
        assert group().stats()["calls"] == 1
        del model
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()
    assert norms == [norms[0]] * len(norms) != [0.0] * len(norms)


def test_a_wrong_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `init_process_group`; test_backend_settings.py has the errors of each variable."""
    monkeypatch.setenv("GRADWIRE_CODEC", "qsgdd")
    with pytest.raises(gw.ConfigError, match=r"GRADWIRE_CODEC.*unknown codec .*'qsgdd'"):
        dist.init_process_group("gradwire", rank=0, world_size=1, store=dist.HashStore())


# ---- unmodified scripts train to the loss that gloo gives, and send far less


EXAMPLES = Path(__file__).parents[2] / "examples"
SEEDS = range(3)


def losses(rank: int, script: str) -> tuple[list[float], dict[str, Any] | None]:
    """The script's last loss per seed, and the backend's statistics."""
    warnings.simplefilter("ignore")
    train_once = runpy.run_path(str(EXAMPLES / script))["train"]
    made = [train_once(seed) for seed in SEEDS]
    stats = getattr(group(), "stats", None)
    return made, stats() if stats is not None else None


@EXHAUSTIVE
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("script", "ranks"), [("ddp_backend.py", 2), ("ddp_backend.py", 4), ("fsdp2_backend.py", 2)]
)
def test_the_loss_is_that_of_gloo(script: str, ranks: int) -> None:
    assert "import gradwire" not in (EXAMPLES / script).read_text()
    made = {
        backend: as_processes(ranks, losses, script, timeout=60, backend=backend)
        for backend in ("gloo", "gradwire")
    }
    reference, _ = made["gloo"][0]
    ours, stats = made["gradwire"][0]
    assert all(of_rank == ours for of_rank, _ in made["gradwire"])
    # Noise: the effect of another seed. Four bits must change less than half as much, in each
    # run; and the loss must have come down, or nothing was trained.
    noise = max(reference) - min(reference)
    for seed in SEEDS:
        assert reference[seed] < 0.5
        assert abs(ours[seed] - reference[seed]) < noise / 2, (ours, reference)
        assert ours[seed] != reference[seed]
    assert stats is not None
    assert stats["calls"] >= 101 * len(SEEDS)
    assert stats["ratio"] > 6.5  # biases are uncompressed
