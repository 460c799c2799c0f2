"""Checkpoints of a handle's state, of all ranks: the page's code, mistakes, and damaged files; and
plans that are attached again.

tests/multiprocess/test_saved_handles.py has what is saved and loaded.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from saved_jobs import Job
from scenario import backward, own_mesh, sharded
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from gradwire.groups import communicator
from gradwire.planner.files import PlanFile
from ranks import raises, refuses
from rooms.state import StateGather


def trained() -> Job:
    job = Job("aggregating")
    job.train(0, 3)
    return job


def test_the_code_of_the_page_runs(rank: int, tmp_path: Path) -> None:
    """The code blocks of docs/how-to/checkpointing.md."""
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "checkpointing.md").read_text()
    page: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, page)
    job = trained()
    page["save"](tmp_path / "all.pt", job.model, job.optimizer, job.handle, 3)
    page["save_own"](tmp_path, job.handle)
    weights = job.weights()
    dist.barrier()
    expected = job.train(3, 4)
    for own in (False, True):
        again = Job("aggregating")
        if own:
            again.has(weights)
            page["load_own"](tmp_path, again.handle)
        else:
            path = tmp_path / "all.pt"
            assert page["load"](path, again.model, again.optimizer, again.handle) == 3
        assert again.train(3, 4) == expected


def test_mistakes(rank: int) -> None:
    job = trained()
    handle, state = job.handle, job.handle.state_dict()
    state["aggregators"]["0.weight"]["residual"].requires_grad_()
    handle.load_state_dict(state)
    job.train(3, 4)
    assert not handle.state_dict()["aggregators"]["0.weight"]["residual"].requires_grad
    full = handle.full_state_dict()
    for said, state in (
        ("full_state_dict(rank0_only=True) gives it on all ranks but 0", {}),
        ("not the full_state_dict of a gradwire handle", {**full, "version": 7}),
        ("give the states of all 2 old ranks", {**full, "ranks": full["ranks"][:1] * 2}),
        ("of 1 ranks, not of 2", {**full, "ranks": full["ranks"][:1]}),
        ("not the full_state_dict of a gradwire handle", {**full, "world_size": "2"}),
        ("not the full_state_dict of a gradwire handle", {**full, "version": True}),
        ("not the full_state_dict of a gradwire handle", {**full, "ranks": "01"}),
        ("not int", 3),
    ):
        refuses(said, lambda state=state: handle.load_state_dict(state))
    calls = partial(handle.full_state_dict, rank0_only=rank == 0)
    assert "'rank0_only=True'" in refuses("disagree on full_state_dict", calls)
    assert len(handle.full_state_dict()["ranks"]) == 2  # told at once, and the next call goes on
    apart = dist.new_group()
    dist.barrier(apart)  # else the peer may still connect its mesh
    gather = StateGather([apart])
    dist.destroy_process_group(apart)
    for _ in range(2):  # as long as someone holds the group, and after
        refuses("was destroyed", lambda: gather(full["ranks"][rank], rank0_only=False))
        apart = None  # type: ignore[assignment]


def test_a_rank_that_calls_alone_is_told(rank: int) -> None:
    """By its group's timeout, which rank did not call."""
    job = Job("aggregating")
    if rank == 0:
        member = communicator(job.model.process_group).member
        assert member is not None
        member.timeout = 0.5
        raises(
            gw.TransportError, job.handle.full_state_dict, "rank 1 did not reach full_state_dict"
        )


def test_a_damaged_checkpoint_is_an_error_in_one_line_on_all_ranks(
    rank: int, tmp_path: Path
) -> None:
    job, path = Job("weights kept as reference"), tmp_path / "dcp"
    job.train(0, 1)
    dcp.save({"gradwire": job.handle.checkpoint()}, checkpoint_id=path)
    said = "under 'other': save {'other': handle.checkpoint()}"
    refuses(said, lambda: job.handle.load(path, key="other"))
    refuses("has no checkpoint", lambda: job.handle.load(f"{path}/none"))
    for number, damage in enumerate((Path.unlink, lambda file: file.write_bytes(b"no"))):
        for what in (".metadata", "__1_0.distcp"):
            broken = Path(f"{path} {number} {what}")
            if rank == 0:
                shutil.copytree(path, broken)
                damage(broken / what)
            dist.barrier()
            said = refuses("", lambda broken=broken: job.handle.load(broken))
            assert said.startswith("load: ")
            assert "\n" not in said
            dist.barrier()
    job.handle.load(path)


# ---- plans


def test_a_saved_plan_is_attached_again(rank: int, tmp_path: Path) -> None:
    path = f"{tmp_path}/ddp{rank}.json"
    ddp = DDP(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)))
    first = gw.attach(ddp, "qsgd:bits=3", codecs={"1.weight": "powersgd:rank=2"})
    first.plan.save(path)
    first.detach()
    handle = gw.attach(ddp, plan=path)
    assert handle.plan.parameters == first.plan.parameters
    ddp(torch.randn(4, 64)).sum().backward()
    handle.detach()
    refuses("leave codec and its options", partial(gw.attach, ddp, "qsgd:bits=2", plan=path))
    other = DDP(nn.Sequential(nn.Linear(64, 32)))
    said = "plan: the module has no parameter 1.weight, which the file has"
    refuses(said, partial(gw.attach, other, plan=path))
    refuses("leave codec", partial(gw.attach, ddp, "auto", plan=path))
    for wrong in (5, "", b"plan.json", [path]):
        refuses("give the path of a file", partial(gw.attach, ddp, plan=wrong))

    planned = replace(PlanFile.read(path), planned={"seconds": 1.0})

    path = f"{tmp_path}/fsdp{rank}.json"
    weights: Any = {"*.weight": "randomshift:bits=6"}
    old = gw.attach(sharded(mesh=own_mesh()), "qsgd:bits=5", weights=weights, error_feedback=True)
    old.plan.save(path)
    model = sharded(mesh=own_mesh())
    new = gw.attach(model, plan=path, options=gw.Options(keep="payload"))
    assert new.plan.parameters == old.plan.parameters
    backward(model, 0)
    refuses("gradwire plan has planned for DDP", partial(gw.attach, model, plan=planned))
    assert new.stats()["weights_wire_bytes"] > 0


# ---- a state of DDP, of FSDP2 by rows, and by columns, loaded into each of them


WAYS = ("ddp", "rows", "columns")


def made(way: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 4, bias=False))
    if way == "ddp":
        model = DDP(model)
    else:
        dim = WAYS.index(way) - 1
        model = fully_shard(model, shard_placement_fn=lambda p: Shard(dim))
    return model, gw.attach(model, "topk:density=0.1", error_feedback=True)


def summed(model: nn.Module, step: int) -> list[torch.Tensor]:
    """The sums over ranks of the gradients of a step, by parameter; averages, without a handle."""
    model.zero_grad()
    of_rank = torch.Generator().manual_seed(10 * step + dist.get_rank())
    model(torch.randn(8, 16, generator=of_rank)).square().mean().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [getattr(g, "full_tensor", lambda g=g: g)().double().flatten() for g in found]


def exact(step: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 4, bias=False))
    gradients = summed(model, step)
    for gradient in gradients:
        dist.all_reduce(gradient)
    return gradients


def kept(full: Any) -> list[torch.Tensor]:
    """The sums over ranks of what was not sent."""
    ranks = [list(state["aggregators"].values()) for state in full["ranks"]]
    return [sum(of["residual"].double() for of in both) for both in zip(*ranks, strict=True)]  # type: ignore[misc]


def test_it_moves_from_each_to_each(rank: int) -> None:
    """Law 2, after the save and after a step of the module that has loaded it."""
    ranks = dist.get_world_size()
    first, second = exact(0), exact(1)
    for saved in WAYS:
        model, handle = made(saved)
        sent = summed(model, 0)
        full = handle.full_state_dict()
        owed = kept(full)
        for gradient, average, rest in zip(first, sent, owed, strict=True):
            torch.testing.assert_close(ranks * average + rest, gradient, rtol=0, atol=1e-6)
            assert rest.any()
        for way in WAYS:
            again, other = made(way)
            other.load_state_dict(full)
            for a, b in zip(owed, kept(other.full_state_dict()), strict=True):
                assert torch.equal(a, b), (saved, way)
            averages = summed(again, 1)
            after = kept(other.full_state_dict())
            for gradient, average, rest, before in zip(second, averages, after, owed, strict=True):
                torch.testing.assert_close(
                    ranks * average + rest, gradient + before, rtol=0, atol=1e-6
                )
