"""`gw.ray`: what a Checkpoint of Ray Train keeps. `loop` is what a worker runs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray.train.torch
import torch
import torch.distributed as dist
from trained import (
    CODEC,
    batches,
    compressed,
    exact,
    net,
    read,
    same_sum,
)

import gradwire as gw
from training import flat, same_everywhere


def loop(config: dict[str, Any]) -> None:
    """Loads the checkpoint from which it goes on, trains, and reports one."""
    model = ray.train.torch.prepare_model(net())
    found = ray.train.get_checkpoint() or config["checkpoint"]
    assert (found is not None) == config["resumes"]
    handle = gw.ray.attach(model, CODEC, error_feedback=True, checkpoint=config["checkpoint"])
    if found is not None:
        with found.as_directory() as folder:
            saved = read(Path(folder) / "gradwire.pt")
            model.load_state_dict(read(Path(folder) / "model.pt"))
        full = handle.full_state_dict()
        (exact if saved["world_size"] == dist.get_world_size() else same_sum)(full, saved)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    if dist.get_world_size() > 1:
        compressed(handle)
    assert same_everywhere(flat(model))
    with tempfile.TemporaryDirectory() as made:
        gw.ray.save(handle, made)
        rank0 = dist.get_rank() == 0
        assert (Path(made) / "gradwire.pt").exists() == rank0
        if rank0:
            torch.save(model.state_dict(), Path(made) / "model.pt")
        told = ray.train.Checkpoint.from_directory(made) if rank0 else None
        ray.train.report({"steps": handle.stats()["steps"]}, checkpoint=told)


def trains(workers: int, folder: Path, name: str, resumes: bool = False, other: Any = None) -> Any:
    """The checkpoint of a run, which goes on from its own of before, or from another one's."""
    result = ray.train.torch.TorchTrainer(
        loop,
        train_loop_config={"checkpoint": other, "resumes": resumes},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(storage_path=str(folder), name=name),
    ).fit()
    assert result.error is None, result.error
    return result.checkpoint
