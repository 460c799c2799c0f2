"""A handle's state in checkpoints of torch.distributed.checkpoint, at equal and other world
sizes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_model import batch, sharded
from test_sharded_weights import own_mesh
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gradwire as gw
from ranks import as_processes, caught

pytestmark = pytest.mark.multiprocess

WEIGHTS = {"*.weight": "learnedlevels:bits=4:block=128"}


def made() -> tuple[Any, Any, Any]:
    model = sharded(mesh=own_mesh())
    codec = "learnedlevels:bits=3:block=128:rounding=stochastic"
    handle = gw.attach(model, codec, error_feedback=True, weights=WEIGHTS, keep="reference")
    return model, handle, torch.optim.AdamW(model.parameters(), lr=1e-3)


def steps(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        loss = model(batch(step), spare=True).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save(path: str, model: Any, optimizer: Any, handle: Any) -> None:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "gradwire": handle.checkpoint()}
    dcp.save(state, checkpoint_id=path)


def load(path: str, model: Any, optimizer: Any, handle: Any) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    handle.load_checkpoint(path)


def saves(rank: int, path: str) -> tuple[Any, Any]:
    model, handle, optimizer = made()
    steps(model, optimizer, 0, 3)
    handle.learn_levels(500, 200)
    save(path, model, optimizer, handle)
    residuals = {n: m.state["residual"].clone() for n, m in handle._members.items() if m.state}
    total = {name: residual.double() for name, residual in residuals.items()}
    for value in total.values():
        dist.all_reduce(value)
    sums = {name: value.sum().item() / dist.get_world_size() for name, value in total.items()}
    return steps(model, optimizer, 3, 6), sums


def resumes(rank: int, path: str, expected: list[float]) -> None:
    model, handle, optimizer = made()
    load(path, model, optimizer, handle)
    assert handle.plan.levels.weights
    assert handle.plan.levels.gradients
    assert steps(model, optimizer, 3, 6) == expected


def moves(rank: int, path: str, sums: dict[str, float], levels_of: int) -> None:
    model, handle, optimizer = made()
    load(path, model, optimizer, handle)
    assert len(handle.plan.levels.gradients) == levels_of
    if dist.get_world_size() > 1:
        for name, expected in sums.items():
            mine = handle._members[name].state["residual"].double()
            dist.all_reduce(mine)
            found = mine.sum().item() / dist.get_world_size()
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)
    losses = steps(model, optimizer, 3, 6)
    assert all(loss < float("inf") for loss in losses)


def test_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    (first, _), (second, _) = as_processes(2, saves, str(tmp_path))
    as_processes(2, resumes_each, str(tmp_path), [first, second])


def resumes_each(rank: int, path: str, expected: list[list[float]]) -> None:
    resumes(rank, path, expected[rank])


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1)])
def test_states_load_at_another_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    _, sums = as_processes(before, saves, str(tmp_path))[0]
    as_processes(after, moves, str(tmp_path), sums, 3)


def under_ddp(rank: int, path: str) -> None:
    def one() -> Any:
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(64, 64), process_group=dist.new_group()
        )
        return model, gw.attach(model, "qsgd:bits=2", error_feedback=True)

    def train(model: Any, first: int, last: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(first, last):
            optimizer.zero_grad()
            made = torch.Generator().manual_seed(100 * step + rank)
            model(torch.randn(8, 64, generator=made)).square().mean().backward()
            optimizer.step()

    model, handle = one()
    train(model, 0, 3)
    dcp.save({"gradwire": handle.checkpoint(), "m": model.module.state_dict()}, checkpoint_id=path)
    other, resumed = one()
    weights = other.module.state_dict()
    dcp.load({"m": weights}, checkpoint_id=path)
    other.module.load_state_dict(weights)
    resumed.load_checkpoint(path)
    for one_model in (model, other):
        train(one_model, 3, 6)
    assert torch.equal(model.module.weight, other.module.weight)
    missing = caught(lambda: resumed.load_checkpoint(path, key="other"))
    assert "under 'other': save {'other': handle.checkpoint()}" in str(missing)
    assert "has no checkpoint" in str(caught(lambda: resumed.load_checkpoint(f"{path}/nothing")))


def test_a_handle_under_ddp_and_bad_input(tmp_path: Path) -> None:
    as_processes(2, under_ddp, str(tmp_path))


def damaged(rank: int, path: str) -> list[str]:
    model, handle, optimizer = made()
    steps(model, optimizer, 0, 1)
    dcp.save({"gradwire": handle.checkpoint()}, checkpoint_id=path)
    errors = []
    for number, damage in enumerate((Path.unlink, lambda file: file.write_bytes(b"no"))):
        for what in (".metadata", "__1_0.distcp"):
            broken = Path(f"{path} {number} {what}")
            if rank == 0:
                shutil.copytree(path, broken)
                damage(broken / what)
            dist.barrier()
            error = caught(lambda broken=broken: handle.load_checkpoint(broken))
            assert isinstance(error, gw.ConfigError), error
            errors.append(str(error))
            dist.barrier()
    handle.load_checkpoint(path)
    return errors


def test_a_damaged_checkpoint_is_an_error_in_one_line_on_all_ranks(tmp_path: Path) -> None:
    for errors in as_processes(2, damaged, str(tmp_path / "checkpoint")):
        assert len(errors) == 4
        for error in errors:
            assert error.startswith("load_checkpoint: ")
            assert "\n" not in error
