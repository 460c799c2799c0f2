"""A rank that dies in a gather of weights, or raises where others gather, is named by them, long
before the timeout."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from test_faults import Report, reported
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire as gw
from gradwire.integrations.backward import in_backward
from ranks import as_processes

pytestmark = pytest.mark.multiprocess

RANKS, DYING, TIMEOUT = 3, 1, 60.0


def three_layers() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
    for module in (*model, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (RANKS,)), reshard_after_forward=True)
    return model


def dies_in_a_gather(rank: int, where: str, keep: str) -> Report:
    model = three_layers()
    handle = gw.attach(model, weights="randomshift:bits=8", keep=keep)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(torch.randn(4, 512)).square().mean().backward()
        optimizer.step()

    step()
    if rank == DYING:
        start = handle.weights.start

        def start_and_die(spec: Any, item: Any, operation: Any, raw_bytes: int) -> Any:
            begun = start(spec, item, operation, raw_bytes)
            if operation.verb == "all_gather" and in_backward() == (where == "backward"):
                os.kill(os.getpid(), signal.SIGKILL)
            return begun

        handle.weights.start = start_and_die
    return reported(step)


@pytest.mark.parametrize(
    ("where", "keep"),
    [("forward", "payload"), ("backward", "none"), ("forward", "reference")],
)
def test_a_death_in_a_gather_is_named_at_once(where: str, keep: str) -> None:
    reports = as_processes(
        RANKS, dies_in_a_gather, where, keep, timeout=TIMEOUT, expect_death=(DYING,)
    )
    for rank, report in enumerate(reports):
        if rank != DYING:
            kind, peer, text, seconds = report
            assert (kind, peer) == ("TransportError", DYING), text
            assert f"rank {DYING}" in text
            assert seconds < TIMEOUT / 4


def raises_where_others_gather(rank: int) -> Report:
    """Of frozen layers no gradients are reduced: the others are ahead by a gather."""
    model = three_layers()
    model[1:].requires_grad_(False)
    gw.attach(model, weights="randomshift:bits=8")
    if rank == DYING:
        model[2].register_full_backward_pre_hook(lambda *_: 1 / 0)
    return reported(lambda: model(torch.randn(4, 512)).square().mean().backward())


def test_an_exception_where_others_gather_is_told() -> None:
    for rank, report in enumerate(as_processes(RANKS, raises_where_others_gather, timeout=TIMEOUT)):
        kind, peer, text, seconds = report
        if rank == DYING:
            assert kind == "ZeroDivisionError", text
        else:
            assert (kind, peer) == ("TransportError", DYING), text
            assert "backward raised an exception in the sharded module of" in text
            assert ", weights" in text
        assert seconds < TIMEOUT / 4
