"""A call that one rank alone refuses is refused by its peers, long before the timeout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_model import by_layer
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from ranks import caught, each, together

pytestmark = pytest.mark.multiprocess

REFUSING = 1


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def wrapped(sharded: bool) -> nn.Module:
    return by_layer(mlp()) if sharded else DDP(mlp())  # type: ignore[no-any-return]


def refused(rank: int, said: str, error: BaseException | None) -> None:
    """The refusing rank has its own error, the others have one that names it."""
    assert isinstance(error, gw.ConfigError), error
    assert str(error).startswith(f"rank {REFUSING}: ") == (rank != REFUSING), error
    assert said in str(error), error


def an_attach(rank: int, sharded: bool, said: str, wrong: dict[str, Any]) -> None:
    """And the next one is one more try of all."""
    model = wrapped(sharded)
    right = {"weights": "randomshift"} if "weights" in wrong else {}
    for _ in range(2):
        given = wrong if rank == REFUSING else right
        refused(rank, said, caught(lambda given=given: gw.attach(model, **given)))  # type: ignore[misc]
    # All of them refuse.
    assert isinstance(caught(lambda: gw.attach(model, **wrong)), gw.ConfigError)
    handle = gw.attach(model)
    model(torch.ones(2, 64)).sum().backward()
    assert handle.stats()["steps"] == 1


WRONG = [
    (False, "no argument 'sed'", {"sed": 1}),
    (False, "seed=-1", {"seed": -1}),
    (False, "no file", {"plan": "/nowhere"}),
    (False, "policy", {"policy": "lgreco", "exclude": ["*"]}),
    (True, "coalesce_bytes", {"coalesce_bytes": 1}),
    (True, "weights", {"weights": "nonsense"}),
    (True, "mixed", {"policy": "lgreco", "replan": gw.Replan(mixed=True)}),
]


def test_what_one_rank_refuses() -> None:
    together(2, *each(an_attach, *WRONG), deadline=25.0)
