"""Cross-barrier training: the same bits wherever late parameters are touched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from crossed import OPTIMIZERS, Make, inputs, late, same, wrapped
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import gradwire as gw
from ranks import on
from training import mlp

pytestmark = pytest.mark.multiprocess


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


def _functional(step: int, net: nn.Module, optimizer: object) -> list[torch.Tensor]:
    late_ones = dict(net.named_parameters())

    def loss_of(these: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(net, these, (inputs(step),)).sum()  # type: ignore[no-any-return]

    return [*torch.func.grad(loss_of)(late_ones).values()]


def _autocast(ddp: DDP, step: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return ddp(inputs(step)).float().square().mean()  # type: ignore[no-any-return]


@on(2, "inference", "transform", "functional", "autocast", "selective")
def test_a_late_step_does_not_see_where_it_is_made(rank: int, what: str) -> None:
    def run(crosses: bool) -> list[torch.Tensor]:
        if what == "autocast":
            return simply(crosses, mlp(20, 40, 20), Squares, loss_of=_autocast)
        if what == "selective":
            return simply(crosses, Selective(), lambda p: torch.optim.NAdam(p, lr=0.01))
        then = {"inference": _inferred, "transform": _transformed, "functional": _functional}
        return simply(crosses, mlp(20, 40, 20), then=then[what])

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
