"""Cross-barrier training: the bits of the run with the barrier, whatever a script does between."""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
from crossed import MODELS, OPTIMIZERS, Make, Net, inputs, late, same, wrapped
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed import GradBucket
from torch.distributed.distributed_c10d import _get_default_store

import gradwire as gw
from ranks import on
from rooms.handles import Awaited, Buckets, cross_barrier
from training import flat, mlp, same_everywhere

pytestmark = pytest.mark.multiprocess


def trained(crosses: bool, script: str, make: Make, steps: int = 10) -> Any:
    """Losses and what else the script sees, weights and the optimizer's state of a training."""
    torch._dynamo.reset()
    counters.clear()
    net = MODELS.get(script, Net)()
    ddp = wrapped(net, script)
    model: Any = torch.compile(ddp, backend="eager") if script == "compiled" else ddp
    biases = [p for name, p in net.named_parameters() if name.endswith("bias")]
    rest = [p for p in net.parameters() if not any(p is bias for bias in biases)]
    optimizer = make([{"params": rest}, {"params": biases, "lr": 0.005}])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    given: dict[str, Any] = {"optimizer": optimizer, "cross_barrier": True} if crosses else {}
    handle = gw.attach(ddp, options=gw.Options(coalesce_bytes=0), **given)
    stepped = mock.Mock(return_value=None)
    optimizer.register_step_post_hook(stepped)
    scaler = torch.amp.GradScaler("cpu", enabled="scaled" in script)
    seen: list[torch.Tensor] = []

    def loss_of(step: int) -> torch.Tensor:
        x = inputs(step).to(next(net.parameters()).dtype)
        left_out = {"spare": step % 3 == 0} if "unused" in script else {}
        return (model(x, **left_out).float() - 1).square().mean()  # type: ignore[no-any-return]

    for step in range(steps):
        if "first" in script:
            optimizer.zero_grad()
        if "accumulate" in script:
            with ddp.no_sync():
                loss_of(1000 + step).backward()
        loss = loss_of(step)
        scaler.scale(loss).backward()
        if "norm" in script:
            seen.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
        if "value" in script:
            nn.utils.clip_grad_value_(net.parameters(), 0.01)
        if "closure" in script:
            optimizer.step(lambda: 0.0)
        else:
            scaler.step(optimizer)
        scaler.update()
        schedule.step()
        if "kept" in script:
            seen += [p.grad.sum() for p in net.parameters() if p.grad is not None]
        if "filled" in script:
            optimizer.zero_grad(set_to_none=False)
        elif "first" not in script and ("grown" not in script or step % 2):
            ddp.zero_grad()
        if "evaluated" in script and step % 2:
            net.eval()
            with torch.no_grad():
                seen.append(net(inputs(77)).sum())
            net.train()
        if "saved" in script and step == 5:
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
        if "saved" in script and step == 6:
            handle.load_state_dict(handle.full_state_dict())
            assert not any(isinstance(p, Awaited) for p in net.parameters())
        if "updated" in script and step == 3:
            handle.update(bits=3).wait()
        seen.append(loss.detach())
    if "detached" in script:
        handle.detach()
        assert not any(isinstance(p, Awaited) for p in net.parameters())
    states = sorted(deepcopy(optimizer.state_dict())["state"].items())
    assert same_everywhere(flat(ddp))
    state = [torch.as_tensor(one) for _, of in states for one in of.values()]
    assert stepped.call_count == steps
    seen.append(torch.tensor(counters["stats"]["unique_graphs"]))
    return [*seen, *net.state_dict().values(), *state]


SCRIPTS = (
    "views", "unused first", "unused views", "norm", "value", "accumulate", "closure", "kept",
    "filled", "grown", "evaluated", "saved", "detached", "accumulate views grown", "unused grown",
    "scaled", *MODELS,
)  # fmt: skip
WAIT = ("norm", "value", "closure", "scaled")  # for all averages, before each step


@on(2, *SCRIPTS)
@on(3, *OPTIMIZERS)
@on(4, "sgd", "adamw", exhaustive=True)
def test_bits_are_those_of_the_run_with_the_barrier(rank: int, what: str) -> None:
    made = OPTIMIZERS.get(what)
    of = ("", made, 50) if made else (what, OPTIMIZERS["fused" if what == "scaled" else "adamw"])
    expected = trained(False, *of)
    with late() as run:
        found = trained(True, *of)
    assert same(found, expected)
    # Buckets that are there when one is waited for step together.
    assert (run.call_count > 2) is (what not in WAIT), run.call_count
    assert same(trained(True, *of), expected)


@on(2)
def test_two_modules_and_a_changing_plan(rank: int) -> None:
    def run(crosses: bool) -> list[torch.Tensor]:
        nets = [mlp(20, 30, 20), mlp(20, 40, 20, seed=1)]
        models, optimizers, handles = [], [], []
        for net in nets:
            models.append(wrapped(net, ""))
            optimizers.append(OPTIMIZERS["sgd"](net.parameters()))
            given = {"optimizer": optimizers[-1], "cross_barrier": True} if crosses else {}
            handles.append(gw.attach(models[-1], "powersgd:rank=2", **given))
        for step in range(8):
            for number in (0, 1):
                optimizers[number].zero_grad()
                made = models[0](inputs(step))
                made = made.detach() if number else made
                models[1](made).square().mean().backward()
                optimizers[number].step()
            if step == 3:
                handles[0].update("qsgd", bits=2).wait()
        assert handles[0].plan.version
        return [p.detach() for net in nets for p in net.parameters()]

    expected = run(False)
    with late() as late_steps:
        assert same(run(True), expected)
    assert late_steps.call_count > 8


@on(2)
def test_a_step_waits_for_no_peer(rank: int) -> None:
    """Rank 1 begins its backward once rank 0 has stepped, and that in every step."""
    net = mlp(20, 40, 40, 20)
    model, optimizer = wrapped(net, ""), OPTIMIZERS["sgd"](net.parameters())
    handle = gw.attach(model, optimizer=optimizer, cross_barrier=True)
    store = _get_default_store()
    given: set[int] = set()  # memory of DDP's buckets
    taken: set[int] = set()  # and of averages
    reduce, landed = Buckets.reduce, cross_barrier.CrossBarrier._landed

    def noting(self: Buckets, bucket: GradBucket) -> Any:
        given.add(bucket.buffer().untyped_storage().data_ptr())
        return reduce(self, bucket)

    def noted(self: cross_barrier.CrossBarrier, late: list[cross_barrier.Late]) -> None:
        taken.update(one.average.untyped_storage().data_ptr() for one in late)
        landed(self, late)

    with (
        mock.patch.object(Buckets, "reduce", noting),
        mock.patch.object(cross_barrier.CrossBarrier, "_landed", noted),
    ):
        for step in range(6):
            loss = model(inputs(step)).square().mean()
            optimizer.zero_grad()
            if rank == 1 and step:  # the first pass has the barrier
                store.wait([f"stepped {step}"])
            loss.backward()
            optimizer.step()
            if rank == 0:
                store.set(f"stepped {step}", "")
    assert taken
    handle.detach()
    assert same_everywhere(flat(model))
    assert taken <= given  # averages are computed in DDP's own buckets


@on(2)
def test_reading_gradients_before_the_step_is_told_once(rank: int) -> None:
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    try:
        with late():
            trained(True, "norm", OPTIMIZERS["adamw"])
    finally:
        logging.getLogger("gradwire").removeHandler(handler)
    assert [one.getMessage().partition(":")[0] for one in said] == ["cross_barrier"]
