"""`Handle.update`: plans that switch while training runs, on all ranks at the same pass."""

from __future__ import annotations

import gc
import random
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from gradwire import groups
from gradwire.aggregators import Observation
from ranks import caught, on, raises, refuses
from training import everywhere, flat, mlp, same_everywhere, train

pytestmark = [pytest.mark.multiprocess, on(2), on(3, exhaustive=True)]


def net() -> nn.Sequential:
    return mlp(20, 60, 50, 3)


def step(model: nn.Module, number: int) -> None:
    train(model, range(number, number + 1))


def until_in_force(model: nn.Module, update: Any, number: int) -> int:
    """Train until a plan is in force; the number of the next step."""
    end = time.monotonic() + 60
    while not all(everywhere(update.in_force)):
        assert all(everywhere(time.monotonic() < end)), f"version {update.version} never came"
        step(model, number)
        number += 1
    return number


OPTIONS = gw.Options(segments=2, coalesce_bytes=0)


def test_every_argument_can_change(rank: int) -> None:
    model = DDP(net(), bucket_cap_mb=0.005)
    handle = gw.attach(model, bits=4, error_feedback=True, options=OPTIONS)
    changes: list[tuple[tuple[Any, ...], dict[str, Any], dict[str, str]]] = [
        ((), {"bits": 2}, {"0.weight": "qsgd:bits=2"}),
        (("topk",), {"density": 0.05}, {"0.weight": "topk:density=0.05", "0.bias": "none"}),
        ((), {"codecs": {"0.weight": "qsgd:bits=8"}},
         {"0.weight": "qsgd:bits=8", "2.weight": "topk"}),
        ((), {"options": replace(handle.plan.options, algorithm="ring")}, {"2.weight": "topk"}),
        ((), {"include": ["*.bias"]}, {"0.bias": "topk"}),
        ((), {"options": gw.Options("ring", coalesce_bytes=1 << 20), "exclude": ["4.*"]},
         {"4.weight": "none"}),
        (("powersgd",), {"rank": 2, "codecs": {"2.weight": "artopk"}},
         {"2.weight": "artopk", "4.bias": "none"}),
        (("dgc",), {"density": 0.05, "momentum": 0.5, "error_feedback": False},
         {"4.bias": "none", "0.bias": "dgc"}),
        ((None,), {}, {"2.weight": "artopk", "0.weight": "qsgd:bits=8"}),
    ]  # fmt: skip
    assert handle.plan.options.segments == 2
    number = 0
    for position, keywords, expected in changes:
        before = handle.plan.version
        update = handle.update(*position, **keywords)
        assert update.version == before + 1
        number = until_in_force(model, update, number)
        assert handle.plan.version == handle.stats()["plan"] == handle.state_dict()["plan"]
        if "options" in keywords:
            assert handle.plan.options == keywords["options"].of_collectives
        how = {name: told["codec"] for name, told in handle.stats()["parameters"].items()}
        assert all(how[name].startswith(text) for name, text in expected.items()), (how, expected)
        saved = handle.state_dict()["parameters"]
        assert all(saved[p.name]["codec"] == p.how for p in handle.plan.parameters)
        assert same_everywhere(flat(model))


@on(2, True, False)
@on(3, True, False, exhaustive=True)
def test_a_pass_has_one_plan(rank: int, in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks ask at different steps, and prepare at different speeds; also over a group that is
    treated as one of NCCL."""
    group = dist.new_group()
    monkeypatch.setattr(groups, "keeps_order", lambda asked, device: in_order and asked is group)
    model = DDP(net(), bucket_cap_mb=0.005, process_group=group)
    handle = gw.attach(model, bits=4, options=gw.Options(coalesce_bytes=0))
    draw = random.Random(rank)
    asked = {k: 5 * k + draw.randrange(4) for k in range(1, 5)}  # update -> the step it comes at
    versions = []
    for number in range(30):
        for k, at in asked.items():
            if at == number:
                handle.update(bits=(2, 8, 4)[k % 3])
        time.sleep(draw.uniform(0, 0.01))
        step(model, number)
        versions.append(handle.plan.version)
    last = handle.update(bits=4)
    while not all(everywhere(last.in_force)):
        step(model, len(versions))
        versions.append(handle.plan.version)
    found = everywhere(versions)
    assert len(set(versions)) > 1
    assert all(one == found[0] for one in found), found
    assert found[0] == sorted(found[0])
    assert same_everywhere(flat(model))


def test_residuals_survive(rank: int) -> None:
    """A residual that a new plan does not have is added to the next gradient."""
    model = DDP(nn.Linear(20, 8, bias=False))
    handle = gw.attach(model, "topk", density=0.1, error_feedback=True)
    seen: list[Observation] = []
    end = handle.observe(lambda o: seen.append(replace(o, average=o.average.clone())))
    number = until_in_force(model, handle.update(density=0.2), 0)
    number = until_in_force(model, handle.update("qsgd", bits=2, error_feedback=True), number)
    assert handle.state_dict()["aggregators"]["weight"]["residual"].any()
    number = until_in_force(model, handle.update(None, error_feedback=False), number)
    assert not handle.state_dict()["aggregators"]
    end()
    told = len(seen)
    step(model, number)
    assert told == len(seen) >= number
    # The sum of all gradients equals the sum of all averages, to the last rounding.
    given = sum(o.gradient.double() for o in seen)
    total = torch.stack([torch.from_numpy(g) for g in everywhere(given.numpy())]).mean(0)
    torch.testing.assert_close(sum(o.average.double() for o in seen), total, rtol=0, atol=1e-5)


def test_unlike_updates_are_named(rank: int) -> None:
    """A forward raises, on all ranks at the same step, however late one of them learns of it."""
    model = DDP(net())
    handle = gw.attach(model)
    for number in range(2):
        step(model, number)
    switch, told = handle._reductions.switch, threading.Event()
    refuse = switch._refuse
    switch._refuse = lambda *what: (told.wait(60), refuse(*what))
    update = handle.update(bits=8 if rank else 2)
    if rank == 0:
        told.set()
        assert "0.weight" in str(caught(lambda: update.wait(60)))
    dist.barrier()
    raised = [caught(lambda n=n: step(model, n)) for n in range(2, 5)]
    assert raised == [None] * 3, "a rank raised what another did not know yet"
    told.set()
    waited = raises(gw.ConfigError, lambda: update.wait(60))
    dist.barrier()
    raised = [caught(lambda n=n: step(model, n)) for n in range(5, 9)]
    assert [raised.index(error) for error in raised if error is not None] == [2]
    assert raised[2] is waited
    assert handle.plan.parameters[0].codec == gw.QSGD(bits=4)
    until_in_force(model, handle.update(bits=8), 9)
    assert handle.plan.parameters[0].codec == gw.QSGD(bits=8)
    assert same_everywhere(flat(model))


def test_updates_of_what_is_gone_are_refused(rank: int) -> None:
    group = dist.new_group()
    model, dropped = (DDP(net(), process_group=group) for _ in range(2))
    handle, of_dropped = gw.attach(model), gw.attach(dropped)
    del dropped
    gc.collect()
    assert "the module of this handle is gone" in str(caught(lambda: of_dropped.update(bits=3)))
    shards = fully_shard(net(), mesh=DeviceMesh.from_group(group, "cpu"))
    handles = handle, gw.attach(shards)
    dist.destroy_process_group(group)
    for one in handles:
        told = refuses("", lambda one=one: one.update(bits=3))
        assert "process group of this handle was destroyed" in told


def test_a_switch_does_not_stall(rank: int) -> None:
    """A new plan in force needs no further agreement and no compilation."""
    model = DDP(net(), bucket_cap_mb=0.005)
    handle = gw.attach(model, bits=4, options=gw.Options(coalesce_bytes=0))
    for number in range(4):
        step(model, number)
    update = handle.update("powersgd", rank=2)
    update.wait(60)
    dist.barrier()
    made = handle._reductions.owner.made
    trace = handle._reductions.owner.comm.runs.begin_trace()
    number = until_in_force(model, update, 4)
    step(model, number)
    handle._reductions.owner.comm.runs.end_trace()
    assert [span.what for span in trace.spans].count("adopt: plan 1") == 1
    assert handle._reductions.owner.made == made, "a layout was agreed on after the switch"


def test_an_update_says_whether_it_is_in_force() -> None:
    model = net()
    handle = gw.attach(model, bits=4)
    update = handle.update(bits=3)
    assert repr(update).startswith("<update to plan 1: pending: ")
    update.wait(60)
    assert repr(update).startswith("<update to plan 1: pending: prepared")
    assert f"\n  {update}" in str(handle)
    for _ in range(2):
        model(torch.randn(16, 20)).sum().backward()
    assert repr(update) == "<update to plan 1: in force>"
    assert "update" not in str(handle)

    def refuses(plan: Any) -> Any:
        raise ValueError(plan.version)

    handle._reductions.switch._rehearse = refuses
    refused = handle.update(bits=2)
    assert isinstance(caught(lambda: refused.wait(60)), gw.ConfigError)
    assert repr(refused) == "<update to plan 2: refused: the plan before it stays in force>"
    assert f"\n  {refused}" in str(handle)
    caught(lambda: model(torch.randn(16, 20)).sum().backward())  # its version begins, and raises it
    assert not refused.in_force
    handle.detach()
    assert "update" not in str(handle)
