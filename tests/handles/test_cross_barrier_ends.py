"""Cross-barrier training: what fails, what ends, and what is refused."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from multiprocessing.util import _exit_function
from typing import Any

import pytest
import torch
from crossed import inputs, late, same, wrapped
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from ends import ends
from ranks import caught, on, raises, refuses
from rooms.handles import Awaited
from training import mlp

pytestmark = pytest.mark.multiprocess


class Fails(torch.autograd.Function):
    """Its backward does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: Callable[[], None]) -> Any:
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.how()


def _raise() -> None:
    raise ValueError("of rank 1")


def _failing(rank: int, how: str) -> tuple[str, Any, int, int]:
    net = mlp(20, 40, 40, 20)
    model, optimizer = wrapped(net, ""), torch.optim.SGD(net.parameters(), lr=0.1)
    handle = gw.attach(model, None, optimizer=optimizer, cross_barrier=True,
                       options=gw.Options(coalesce_bytes=0))  # fmt: skip
    for step in range(3):
        model(inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [p.detach().clone() for p in net.parameters()]
    end = _raise if how == "raises" else lambda: os._exit(0)
    fails: Any = (lambda x: Fails.apply(x, end)) if rank else lambda x: x
    x = inputs(3).requires_grad_()
    net[2].register_forward_pre_hook(lambda _, given: fails(*given))  # later layers are sent
    model(x).square().mean().backward()
    optimizer.step()  # waits for nobody
    error: Any = caught(lambda: model(inputs(4)))
    assert not any(isinstance(p, Awaited) for p in net.parameters())
    moved = sum(not torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
    raises(gw.TransportError, lambda: model(inputs(5)).sum().backward(), "rank 1")
    refuses("does not go on", handle.recover)
    return str(error), error.peer, moved, len(before)


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_failed_average_steps_nothing_and_is_said_where_it_is_touched(how: str) -> None:
    end = ends(2, _failing, how, unawaited=(1,))[0]
    assert end.error is None, end
    text, peer, moved, parameters = end.value
    stepped = re.search(r"of (\d+) parameters of the last step (\d+) have stepped", text)
    assert stepped, text
    assert peer == 1
    assert (int(stepped[1]), int(stepped[2])) == (parameters, moved)
    assert moved < parameters
    assert "have not: " in text


def _exits(rank: int) -> list[torch.Tensor]:
    net = mlp(20, 40, 40, 20)
    model, optimizer = wrapped(net, ""), torch.optim.SGD(net.parameters(), lr=0.1)
    gw.attach(model, optimizer=optimizer, cross_barrier=True)
    store = _get_default_store()
    with late():
        for step in range(3):
            model(inputs(step)).square().mean().backward()
            optimizer.step()
        assert all(isinstance(p, Awaited) for p in net.parameters())
        if rank == 0:
            _exit_function()  # what Python runs as a process ends
            assert not any(isinstance(p, Awaited) for p in net.parameters())
            store.set("ended", "")
        store.wait(["ended"])
    return [p.detach() for p in net.parameters()]


def test_a_process_ends_once_its_peers_have_their_averages() -> None:
    first, second = ends(2, _exits)
    assert (first.error, second.error) == (None, None), (first, second)
    assert same(first.value, second.value)


@on(2)
def test_what_is_refused(rank: int) -> None:
    net = mlp(20, 40, 20)
    model, sgd = DDP(net), torch.optim.SGD(net.parameters(), lr=0.1)

    def attach(optimizer: Any, cross_barrier: Any = True) -> None:
        gw.attach(model, optimizer=optimizer, cross_barrier=cross_barrier)

    class Own(torch.optim.SGD):
        pass

    own = Own(net.parameters(), lr=0.1)
    compiled = torch.optim.SGD(net.parameters(), lr=0.1)
    compiled.step = torch.compile(compiled.step)  # type: ignore[method-assign]
    refuses("give the torch.optim.Optimizer", lambda: attach(None))
    refuses("Sequential is no torch.optim.Optimizer", lambda: attach(net))
    refuses("give True or False", lambda: attach(sgd, 1))
    refuses("optimizer is for cross_barrier=True", lambda: attach(sgd, False))
    refuses("per_parameter = True in class Own", lambda: attach(own))
    refuses("LBFGS is not known", lambda: attach(torch.optim.LBFGS(net.parameters())))
    refuses("none of this module's", lambda: attach(torch.optim.SGD(mlp(2, 2).parameters())))
    refuses("SGD.step is compiled", lambda: attach(compiled))
    refuses(
        "differentiable", lambda: attach(torch.optim.SGD(net.parameters(), differentiable=True))
    )
    bare = DDP(nn.Linear(2, 2, dtype=torch.complex64))
    refuses("parameter weight is complex", lambda: gw.attach(
        bare, None, optimizer=torch.optim.SGD(bare.parameters()), cross_barrier=True))  # fmt: skip
    Own.per_parameter = True  # type: ignore[attr-defined]
    attach(own)
