"""Cross-barrier training: the bits of the run with the barrier, whatever a script does between."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from crossed import MODELS, OPTIMIZERS, Make, Net, inputs, late, same, wrapped
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import gradwire as gw
from ranks import on
from rooms.decide import Pass, Passes, Use
from rooms.handles import Awaited, Urgency, cross_barrier
from training import everywhere, flat, mlp, same_everywhere

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
    assert (run.call_count > 5) is (what not in WAIT), run.call_count
    assert same(trained(True, *of), expected)


class Squares(torch.optim.Optimizer):
    """Its update multiplies matrices, which autocast would round."""

    per_parameter = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad if p.ndim < 2 else p.grad @ p.grad.T @ p.grad, alpha=0.01)


class Selective(nn.Module):
    """Its backward takes some results of the checkpointed forward, by their operations."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = mlp(20, 40, 20), mlp(20, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [torch.ops.aten.div.Tensor, torch.ops.aten.sqrt.default]
        made = checkpoint(
            lambda x: (self.inner(x) / 2).square().add(1).sqrt(), x, use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, kept),
        )  # fmt: skip
        return self.outer(made)  # type: ignore[no-any-return]


def simply(
    crosses: bool,
    net: nn.Module,
    make: Make = OPTIMIZERS["adamw"],
    then: Callable[[int, nn.Module, torch.optim.Optimizer], list[torch.Tensor]] = lambda *_: [],
    loss_of: Callable[[DDP, int], torch.Tensor] = lambda ddp, step: (
        ddp(inputs(step)).square().sum()
    ),
) -> list[torch.Tensor]:
    """What `then` sees of a training after each step, and the weights."""
    ddp, optimizer, seen = wrapped(net, ""), make(net.parameters()), []
    given: dict[str, Any] = {"optimizer": optimizer, "cross_barrier": True} if crosses else {}
    handle = gw.attach(ddp, options=gw.Options(coalesce_bytes=0), **given)
    for step in range(6):
        loss_of(ddp, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += then(step, net, optimizer)
    handle.detach()
    return [*seen, *(p.detach() for p in net.parameters())]


def _inferred(step: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's new state is used by a step outside of inference mode."""
    if step == 2:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        return []
    with torch.inference_mode(step == 3):
        return [net(inputs(99)).clone()]


def _transformed(step: int, net: nn.Module, optimizer: object) -> list[torch.Tensor]:
    return [torch.func.grad(lambda x: net(x).sum())(inputs(step))]


def _autocast(ddp: DDP, step: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return ddp(inputs(step)).float().square().mean()  # type: ignore[no-any-return]


@on(2, "inference", "transform", "autocast", "selective")
def test_a_late_step_does_not_see_where_it_is_made(rank: int, what: str) -> None:
    def run(crosses: bool) -> list[torch.Tensor]:
        if what == "autocast":
            return simply(crosses, mlp(20, 40, 20), Squares, loss_of=_autocast)
        if what == "selective":
            return simply(crosses, Selective(), lambda p: torch.optim.NAdam(p, lr=0.01))
        then = _inferred if what == "inference" else _transformed
        return simply(crosses, mlp(20, 40, 20), then=then)

    expected = run(False)
    with late() as steps:
        assert same(run(True), expected)
    assert steps.call_count


def _backwards(ddp: DDP, step: int, what: str) -> torch.Tensor:
    """A backward of the module, and then one that was recorded before it."""
    if what == "penalty":
        other = sum(p.square().sum() for p in ddp.parameters())
    elif what == "module":
        other = ddp.module(inputs(100 + step)).square().mean()
    else:
        with ddp.no_sync():
            other = ddp(inputs(100 + step)).square().mean()
    ddp(inputs(step)).square().mean().backward()
    return other  # type: ignore[return-value]


@on(2, "penalty", "module", "no_sync")
def test_a_backward_that_is_not_the_modules_adds_to_averages(rank: int, what: str) -> None:
    def run(crosses: bool) -> list[torch.Tensor]:
        return simply(
            crosses, mlp(20, 40, 40, 20), loss_of=lambda ddp, step: _backwards(ddp, step, what)
        )

    expected = run(False)
    with late():
        assert same(run(True), expected)


class Derived(torch.optim.AdamW):
    """Its step is its base's, whose hooks run within it."""

    per_parameter = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


@on(2, "before", "after", "late", "derived")
def test_hooks_of_steps_find_all_gradients(rank: int, what: str) -> None:
    def run(crosses: bool) -> list[torch.Tensor]:
        net, seen = mlp(20, 40, 40, 20), []

        def hook(*_: object) -> None:
            for p in net.parameters():
                if p.grad is not None:
                    seen.append(p.grad.clone())
                    p.grad.clamp_(-0.001, 0.001)

        def make(parameters: Any) -> torch.optim.Optimizer:
            OPTIMIZERS["adamw"]([nn.Parameter(torch.ones(1))])  # its step calls hooks now
            made = (Derived if what == "derived" else torch.optim.AdamW)(parameters, lr=0.01)
            if what in ("before", "after"):
                made.register_step_post_hook(hook)
            return made

        def then(step: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
            if what in ("after", "late") and step == 2:
                optimizer.register_step_pre_hook(hook)
            return seen

        return simply(crosses, net, make, then)

    expected = run(False)
    with late() as steps:
        assert same(run(True), expected)
    assert steps.call_count


@on(2)
def test_a_scripted_layer(rank: int) -> None:
    def run(crosses: bool) -> list[torch.Tensor]:
        net = mlp(20, 40, 20)
        net[2] = torch.jit.script(net[2])
        return simply(crosses, net)

    expected = run(False)
    with late():
        assert same(run(True), expected)


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
    store, taken = _get_default_store(), []
    with mock.patch.object(
        cross_barrier.CrossBarrier, "_landed", autospec=True,
        side_effect=cross_barrier.CrossBarrier._landed,
    ) as landed:  # fmt: skip
        for step in range(6):
            loss = model(inputs(step)).square().mean()
            optimizer.zero_grad()
            if rank == 1 and step:  # the first pass has the barrier
                store.wait([f"stepped {step}"])
            loss.backward()
            optimizer.step()
            if rank == 0:
                store.set(f"stepped {step}", "")
            taken += [weakref.ref(of.average._base) for call in landed.mock_calls
                      for of in call.args[1]]  # fmt: skip
            landed.reset_mock()
    assert len(taken) > 4
    assert rank or handle.stats()["exposed_seconds"] > 0
    handle.detach()
    assert same_everywhere(flat(model))
    assert not any(copy() is not None for copy in taken)  # one more gradient buffer, for one step


@on(2)
def test_first_layers_go_first_once_ranks_have_agreed(rank: int) -> None:
    net = mlp(20, 40, 40, 40, 40, 40, 20)
    model, optimizer = wrapped(net, ""), torch.optim.SGD(net.parameters(), lr=0.1)
    handle = gw.attach(model, optimizer=optimizer, cross_barrier=True,
                       options=gw.Options(coalesce_bytes=0))  # fmt: skip
    urgency, buckets, sent = handle._reductions._crossing.urgency, handle._reductions, []
    start, orders = buckets._start, []

    def started(shares: Any) -> None:
        sent.append(shares[0].bucket)
        start(shares)

    # As if one scope had ended as backward did on rank 0, and none on rank 1.
    def note() -> None:
        urgency._seen = [(1 - rank, len(sent))]

    with mock.patch.multiple(buckets, _start=started), mock.patch.object(urgency, "note", note):
        for step in range(24):
            model(inputs(step)).square().mean().backward()
            optimizer.step()
            orders.append([*sent])
            sent.clear()
            buckets.runner.wait()
    plain = [*range(len(orders[-1]))]
    ordered = plain[:3] + plain[:2:-1]
    assert orders.count(ordered) >= 6
    assert all(one in (plain, ordered) for one in orders[2:])
    assert everywhere(orders) == [orders] * 2
    assert everywhere(urgency.eager) == [urgency.eager] * 2
    assert same_everywhere(flat(model))


@pytest.mark.parametrize(("after", "kept"), [(0.9, 5), (1.1, None)])
def test_the_order_stays_if_the_slowest_rank_is_faster(after: float, kept: int | None) -> None:
    urgency = Urgency(window=2)
    for ended in (1, 3, 2):
        urgency.begin()
        assert urgency.order([[number] for number in range(9)], True)[-1] == [8]
        urgency.ended = ended
        urgency.note()
    script = urgency.script("it")
    command = next(script)
    with suppress(StopIteration):
        while True:
            if isinstance(command, Passes):
                seconds = 1.0 if urgency.eager is None else after
                answer: Any = [Pass(n, 0, seconds) for n in range(command.count)]
            elif isinstance(command, Use):
                command.then()
                answer = None
            elif command.key.endswith("gains"):
                answer = [command.value, [0.8, 0.2]]
            else:
                answer = [[3, [9]], command.value]
            command = script.send(answer)
    assert urgency.eager == kept
    urgency.begin()
    numbers = [one[0] for one in urgency.order([[number] for number in range(9)], True)]
    assert numbers == ([*range(5), 8, 7, 6, 5] if kept else [*range(9)])


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
