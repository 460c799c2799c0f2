"""A plan that was saved is attached again, under DDP and FSDP2."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scenario import backward, own_mesh, sharded
from torch import nn

import gradwire as gw
from gradwire.planner.files import PlanFile
from ranks import refuses


def test_a_saved_plan_is_attached_again(rank: int, tmp_path: Path) -> None:
    path = f"{tmp_path}/ddp{rank}.json"
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)))
    first = gw.attach(ddp, "qsgd:bits=3", codecs={"1.weight": "powersgd:rank=2"})
    first.plan.save(path)
    first.detach()
    handle = gw.attach(ddp, plan=path)
    assert handle.plan.parameters == first.plan.parameters
    ddp(torch.randn(4, 64)).sum().backward()
    handle.detach()
    refuses("leave codec and its options", partial(gw.attach, ddp, "qsgd:bits=2", plan=path))
    other = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 32)))
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
    new = gw.attach(model, plan=path, keep="payload")
    assert new.plan.parameters == old.plan.parameters
    backward(model, 0)
    refuses("gradwire plan has planned for DDP", partial(gw.attach, model, plan=planned))
    assert new.stats()["weights_wire_bytes"] > 0
