"""What tests of trainers share: a launcher's environment, a model, data, and what must hold."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw
from training import flat, mlp, same_everywhere

CODEC = "qsgd:bits=4"
HOW = {"error_feedback": True, "policy": "lgreco"}  # which decides nothing in so few steps
DEVICE = os.environ.get("GRADWIRE_TEST_DEVICE", "cpu")  # cuda: all ranks share one GPU, over gloo
BATCHES = 3  # per rank and epoch
OUTER = partial(gw.outer, every=2, codec="topk:density=0.1")  # which draws no random numbers


def as_under_torchrun(rank: int) -> None:
    """Trainers read the environment, and use the process group that is there. They give each rank
    of a node its own GPU: ranks that share one are a node each."""
    size, nodes = dist.get_world_size(), cluster()["num_nodes"]
    local = {"LOCAL_RANK": rank * (nodes == 1), "LOCAL_WORLD_SIZE": size // nodes}
    of_all = {"RANK": rank, "WORLD_SIZE": size, "GROUP_RANK": rank * (nodes > 1)}
    os.environ.update({name: str(value) for name, value in (local | of_all).items()})
    os.environ.update(TORCHELASTIC_RUN_ID="test", HF_HUB_OFFLINE="1")


def as_a_job_of_its_own() -> None:
    """As replicas of `gw.outer` are: started by python, with a process group made before."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        os.environ.pop(name, None)
    os.environ.pop("TORCHELASTIC_RUN_ID", None)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)


def met(again: Any, whole: Any, outer: Any) -> None:
    """A replica that was resumed has the bits of one that went on, and others have not."""
    assert torch.equal(flat(again), flat(whole))
    assert not same_everywhere(flat(again))
    assert all(same_everywhere(values) for values in outer.outer_weights().values())
    assert outer.stats()["rounds"] > 0


def cluster() -> dict[str, Any]:
    """Lightning's arguments."""
    size = dist.get_world_size()
    nodes = size if DEVICE == "cuda" else 1
    return {"accelerator": DEVICE, "devices": size // nodes, "num_nodes": nodes}


def net() -> nn.Sequential:
    return mlp(64, 64, 64, between=nn.Tanh)


def data() -> torch.Tensor:
    made = torch.Generator().manual_seed(1)
    return torch.randn(4 * BATCHES * dist.get_world_size(), 64, generator=made)


def compressed(handle: gw.Handle | None) -> None:
    assert handle is not None
    stats = handle.stats()
    assert stats["steps"] > 0
    assert stats["ratio"] > 4
    assert stats["residual_bytes"] > 0


def batches() -> Iterator[torch.Tensor]:
    """This rank's."""
    of_all = data().view(BATCHES, dist.get_world_size(), 4, 64)
    return iter(of_all[:, dist.get_rank()].to(DEVICE))


def read(path: Path | str) -> Any:
    return torch.load(path, weights_only=True)


def residuals(full: Any) -> list[dict[str, torch.Tensor]]:
    """By rank and parameter."""
    return [
        {name: kept["residual"] for name, kept in state["aggregators"].items()}
        for state in full["ranks"]
    ]


def exact(full: Any, saved: Any) -> None:
    """Residuals, steps and policy of every rank are those of the checkpoint, residuals not zero."""
    assert full["world_size"] == saved["world_size"] == len(saved["ranks"])
    for of, expected in zip(residuals(full), residuals(saved), strict=True):
        assert of.keys() == expected.keys()
        for name, residual in expected.items():
            assert residual.any(), name
            assert torch.equal(of[name], residual), name
    assert not torch.equal(*(next(iter(of.values())) for of in residuals(saved)[:2]))
    for now, before in zip(full["ranks"], saved["ranks"], strict=True):
        assert now["steps"] == before["steps"]
        assert now.get("policy") == before.get("policy")


def same_sum(full: Any, saved: Any) -> None:
    """At another number of ranks, the mean of what was not sent is the checkpoint's."""
    assert full["world_size"] != saved["world_size"]
    for name in residuals(saved)[0]:
        now, before = (
            sum(of[name].double() for of in residuals(state)) / state["world_size"]
            for state in (full, saved)
        )
        torch.testing.assert_close(now, before, atol=1e-7, rtol=1e-5)
