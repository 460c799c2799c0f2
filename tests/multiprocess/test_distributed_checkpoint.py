"""A handle's state in checkpoints of torch.distributed.checkpoint, at equal and other world
sizes."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_model import on_all, own_mesh, sharded, steps
from together import together
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gradwire as gw
from ranks import caught

pytestmark = pytest.mark.multiprocess

WEIGHTS = {"*.weight": "learnedlevels:bits=4:block=128"}


def made() -> tuple[Any, Any, Any]:
    model = sharded(mesh=own_mesh())
    codec = "learnedlevels:bits=3:block=128:rounding=stochastic"
    handle = gw.attach(model, codec, error_feedback=True, weights=WEIGHTS, keep="reference")
    return model, handle, torch.optim.AdamW(model.parameters(), lr=1e-3)


def save(path: str, model: Any, optimizer: Any, handle: Any) -> None:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "gradwire": handle.checkpoint()}
    dcp.save(state, checkpoint_id=path)


def load(path: str, model: Any, optimizer: Any, handle: Any) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    handle.load_checkpoint(path)


def saves(rank: int, path: str) -> dict[str, float]:
    """What is owed of each parameter: the sum of its residuals over ranks, over their number.
    Training resumes from it bit for bit."""
    model, handle, optimizer = made()
    steps(model, optimizer, 0, 2)
    handle.learn_levels(2000, 100)
    save(path, model, optimizer, handle)
    owed = {name: owed_of(handle, name) for name, m in handle._members.items() if m.state}
    expected = steps(model, optimizer, 2, 4)
    model, handle, optimizer = made()
    load(path, model, optimizer, handle)
    assert handle.plan.levels.weights
    assert handle.plan.levels.gradients
    assert steps(model, optimizer, 2, 4) == expected
    return owed


def owed_of(handle: Any, name: str) -> float:
    parts = on_all(handle._members[name].state["residual"].double().sum().item())
    return float(sum(parts) / len(parts))


def moves(rank: int, path: str, owed: dict[str, float]) -> None:
    model, handle, optimizer = made()
    load(path, model, optimizer, handle)
    assert len(handle.plan.levels.gradients) == 2
    if dist.get_world_size() > 1:
        for name, expected in owed.items():
            assert owed_of(handle, name) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    losses = steps(model, optimizer, 2, 4)
    assert all(loss < float("inf") for loss in losses)


def a_handle_under_ddp_and_bad_input(rank: int, path: str) -> None:
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
    train(model, 0, 2)
    dcp.save({"gradwire": handle.checkpoint(), "m": model.module.state_dict()}, checkpoint_id=path)
    other, resumed = one()
    weights = other.module.state_dict()
    dcp.load({"m": weights}, checkpoint_id=path)
    other.module.load_state_dict(weights)
    resumed.load_checkpoint(path)
    for one_model in (model, other):
        train(one_model, 2, 4)
    assert torch.equal(model.module.weight, other.module.weight)
    missing = caught(lambda: resumed.load_checkpoint(path, key="other"))
    assert "under 'other': save {'other': handle.checkpoint()}" in str(missing)
    assert "has no checkpoint" in str(caught(lambda: resumed.load_checkpoint(f"{path}/nothing")))


def a_damaged_checkpoint_is_an_error_in_one_line_on_all_ranks(rank: int, path: str) -> None:
    model, handle, optimizer = made()
    steps(model, optimizer, 0, 1)
    dcp.save({"gradwire": handle.checkpoint()}, checkpoint_id=path)
    for number, damage in enumerate((Path.unlink, lambda file: file.write_bytes(b"no"))):
        for what in (".metadata", "__1_0.distcp"):
            broken = Path(f"{path} {number} {what}")
            if rank == 0:
                shutil.copytree(path, broken)
                damage(broken / what)
            dist.barrier()
            error = caught(lambda broken=broken: handle.load_checkpoint(broken))
            assert isinstance(error, gw.ConfigError), error
            assert str(error).startswith("load_checkpoint: ")
            assert "\n" not in str(error)
            dist.barrier()
    handle.load_checkpoint(path)


def test_training_resumes_bit_for_bit_and_at_another_number_of_ranks(tmp_path: Path) -> None:
    two = str(tmp_path / "two")
    (owed, _), *_ = together(
        2,
        partial(saves, path=two),
        partial(a_handle_under_ddp_and_bad_input, path=str(tmp_path / "ddp")),
        partial(
            a_damaged_checkpoint_is_an_error_in_one_line_on_all_ranks, path=str(tmp_path / "bad")
        ),
    )
    together(3, partial(moves, path=two, owed=owed))


@pytest.mark.exhaustive
def test_training_goes_on_at_fewer_ranks(tmp_path: Path) -> None:
    ((owed, *_),) = together(3, partial(saves, path=str(tmp_path)))
    for ranks in (2, 1):
        together(ranks, partial(moves, path=str(tmp_path), owed=owed))
