"""Cross-barrier training: the bits of the run with the barrier, whatever a script does between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from ranks import on
from rooms.handles import Awaited, Step, cross_barrier
from training import flat, same_everywhere

pytestmark = pytest.mark.multiprocess

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, amsgrad=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
}


class Net(nn.Module):
    """Tied weights, a frozen layer, one that some steps leave out, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(20, 40)
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.norm = nn.BatchNorm1d(40)
        self.second = nn.Linear(40, 20)
        self.spare = nn.Linear(20, 20)
        self.third = nn.Linear(20, 40, bias=False)
        self.last = nn.Linear(20, 40, bias=False)
        self.last.weight = self.third.weight
        self.free = nn.Parameter(torch.ones(40))

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        x = self.second(self.norm(self.frozen(self.first(x).relu())))
        x = x + self.spare(x) if spare else x
        return self.last(self.second(self.third(x).relu())) * self.free


@contextmanager
def late() -> Iterator[mock.Mock]:
    """No average is there as the script steps; gives what counts late steps."""
    run = mock.Mock(side_effect=Step.run)
    with mock.patch.object(cross_barrier, "_is_there", lambda bucket: False):
        with mock.patch.object(Step, "run", lambda *of: run(*of)):
            yield run


def inputs(step: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 20, generator=made)


def trained(
    make: Make, crosses: bool, steps: int, script: str = "", codec: str = "qsgd:bits=4"
) -> list[torch.Tensor]:
    """Losses, weights and the optimizer's state of a training."""
    net = Net()
    unused, views = "unused" in script, "views" in script
    model = DDP(net, bucket_cap_mb=0.004, find_unused_parameters=unused,
                gradient_as_bucket_view=views)  # fmt: skip
    biases = [p for name, p in net.named_parameters() if name.endswith("bias")]
    rest = [p for p in net.parameters() if not any(p is bias for bias in biases)]
    optimizer = make([{"params": rest}, {"params": biases, "lr": 0.005}])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    given: dict[str, Any] = {"optimizer": optimizer, "cross_barrier": True} if crosses else {}
    handle = gw.attach(model, codec, options=gw.Options(coalesce_bytes=0), **given)
    losses = []
    for step in range(steps):
        if "first" in script:
            optimizer.zero_grad()
        if "accumulate" in script:
            with model.no_sync():
                model(inputs(1000 + step), True).square().mean().backward()
        loss = (model(inputs(step), not unused or step % 3 == 0) - 1).square().mean()
        loss.backward()
        if "norm" in script:
            losses.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
        if "value" in script:
            nn.utils.clip_grad_value_(net.parameters(), 0.01)
        if "closure" in script:
            optimizer.step(lambda: 0.0)
        else:
            optimizer.step()
        schedule.step()
        if "kept" in script:
            losses += [p.grad.sum() for p in net.parameters() if p.grad is not None]
        if "filled" in script:
            optimizer.zero_grad(set_to_none=False)
        elif "first" not in script and ("grown" not in script or step % 2):
            model.zero_grad()
        if "evaluated" in script and step % 2:
            net.eval()
            with torch.no_grad():
                losses.append(net(inputs(77)).sum())
            net.train()
        if "saved" in script and step == 5:
            handle.load_state_dict(handle.full_state_dict())
            optimizer.load_state_dict(optimizer.state_dict())
        if "updated" in script and step == 3:
            handle.update(bits=3).wait()
        losses.append(loss.detach())
    if "detached" in script:
        handle.detach()
        assert not any(isinstance(p, Awaited) for p in net.parameters())
    states = sorted(optimizer.state_dict()["state"].items())
    state = [one for _, of in states for one in of.values()]
    assert same_everywhere(flat(model))
    return [*losses, *net.state_dict().values(), *map(torch.as_tensor, state)]


SCRIPTS = (
    "views", "unused first", "unused views", "norm", "value", "accumulate", "closure", "kept",
    "filled", "grown", "evaluated", "saved", "detached", "accumulate views grown", "unused grown",
    "updated",
)  # fmt: skip


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@on(2, *SCRIPTS)
@on(3, *OPTIMIZERS)
def test_bits_are_those_of_the_run_with_the_barrier(rank: int, what: str) -> None:
    make, script = OPTIMIZERS.get(what), what
    steps = 50 if make else 12
    of = make or OPTIMIZERS["adamw"], steps, "" if make else script
    expected = trained(of[0], False, *of[1:])
    with late() as run:
        found = trained(of[0], True, *of[1:])
    assert same(found, expected)
    crossed = script not in ("norm", "value", "closure", "unused grown")
    assert crossed is (run.call_count > steps), run.call_count
    assert same(trained(of[0], True, *of[1:]), expected)
