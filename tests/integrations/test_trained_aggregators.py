"""Aggregators of several rounds train a DDP model with many small buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from products import EXHAUSTIVE
from ranks import as_processes, check_each

pytestmark = pytest.mark.multiprocess

Method = tuple[str, Mapping[str, Any]]

METHODS: dict[str, Method] = {
    "powersgd": ("powersgd", {"rank": 2}),
    "artopk": ("artopk", {"density": 0.01}),
    "topkc": ("topkc", {"bits": 1, "chunk": 32}),
    "thc": ("thc", {"bits": 5, "error_feedback": True}),
    "artopk auto": ("artopk", {"density": 0.02, "leader": "auto", "scope": "model"}),
    "lwtopk": ("lwtopk", {"density": 0.01}),
    "globaltopk": ("globaltopk", {"density": 0.01}),
    # Under Adam, without momentum of its own.
    "dgc": ("dgc", {"density": 0.01, "momentum": 0, "warmup": 20, "clip": 3.0}),
    "mixed": (
        "powersgd",
        {"rank": 2, "codecs": {"*.3.weight": "artopk", "*.4.weight": "qsgd"}},
    ),
}
# Which other files do not train on several ranks.
FEW = ("topkc", "thc", "artopk auto", "dgc", "mixed")
EXPECTED = {"mixed": {"powersgd", "artopk", "QSGD"}}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [30, 120, 130, 120, 110, 100, 8]
        self.layers = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


Trained = tuple[list[float], bytes, str]  # losses, the weights' bits, the codecs in use


def trains(method: Method, rank: int, steps: int) -> Trained:
    name, options = method
    model = DDP(MLP(), bucket_cap_mb=0.1)
    handle = gw.attach(model, name, coalesce_bytes=0, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    target = torch.randn(30, 8, generator=torch.Generator().manual_seed(5)) / 5
    inputs = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 30, generator=inputs)
        loss = (model(x) - x @ target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    bits = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    codecs = " ".join(told["codec"] for told in handle.stats()["parameters"].values())
    handle.detach()
    dist.barrier()
    return losses, bits.numpy().tobytes(), codecs


class Branch(nn.Module):
    """A layer, and one that may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Linear(40, 40)
        self.spare = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        out: torch.Tensor = self.used(x)
        return self.spare(out) if spare else out


UNUSED: dict[str, Method] = {
    "topkc": ("topkc", {"bits": 1, "chunk": 32}),
    "powersgd": ("powersgd", {"rank": 2}),
    "lwtopk": ("lwtopk", {"density": 0.05}),
    "dgc": ("dgc", {"density": 0.05}),
    "dgc that clips": ("dgc", {"density": 0.05, "clip": 0.1}),
    "qsgd": ("qsgd", {"bits": 2, "error_feedback": True}),
}


def leaves_unused_parameters(rank: int, method: Method) -> None:
    name, options = method
    model = DDP(Branch(), find_unused_parameters=True)
    handle = gw.attach(model, name, **options)
    inputs, spare = torch.Generator().manual_seed(rank), model.module.spare.weight

    def step(used: bool) -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(torch.randn(8, 40, generator=inputs), used).square().mean().backward()
        state: dict[str, torch.Tensor] = handle.state_dict()["aggregators"]["spare.weight"]
        return {kept: t for kept, t in state.items() if kept != "basis"}

    for _ in range(3):
        before = step(True)
    assert all(kept.any() for kept in before.values())
    for _ in range(3):  # no rank uses it
        after = step(False)
        assert spare.grad is None
        assert all(torch.equal(kept, after[key]) for key, kept in before.items())
    after = step(rank == 0)  # one does
    assert spare.grad.any()
    assert rank == 1 or not torch.equal(after["residual"], before["residual"])
    step(True)
    assert spare.grad.isfinite().all()
    assert spare.grad.any()
    handle.update("qsgd", error_feedback=False).wait()
    for _ in range(3):
        after = step(False)
    assert "owed" in after, "what a former residual owes waits, too"
    handle.detach()


def unused_ones(rank: int, names: Sequence[str]) -> dict[str, str]:
    """The stacks of the methods that fail."""
    failed = {}
    for name in names:
        for stack in check_each(rank, [leaves_unused_parameters], UNUSED[name]).values():
            failed[name] = f"{name}, rank {rank}:\n{stack}"
    return failed


@pytest.mark.parametrize(
    "names",
    [
        ("powersgd", "dgc that clips", "qsgd"),
        pytest.param(("topkc", "lwtopk", "dgc"), marks=EXHAUSTIVE),
    ],
)
def test_unused_parameters_keep_what_was_not_sent(names: Sequence[str]) -> None:
    found = as_processes(2, unused_ones, names)
    assert not any(found), "\n".join(stack for failed in found for stack in failed.values())


def trains_all(rank: int, names: Sequence[str], steps: int) -> list[Trained]:
    return [trains(METHODS[name], rank, steps) for name in names]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("steps", "names"),
    [
        (3, FEW),
        pytest.param(80, ("powersgd", "thc"), marks=EXHAUSTIVE),
        pytest.param(25, tuple(METHODS), marks=EXHAUSTIVE),
        pytest.param(300, tuple(METHODS), marks=EXHAUSTIVE),
    ],
)
def test_they_train(steps: int, names: Sequence[str]) -> None:
    found = as_processes(3, trains_all, names, steps, deadline=600)
    for name, ranks in zip(names, zip(*found, strict=True), strict=True):
        for losses, bits, codecs in ranks:
            assert bits == ranks[0][1], name
            assert torch.tensor(losses).isfinite().all(), name
            assert all(kind in codecs for kind in EXPECTED.get(name, {METHODS[name][0]})), codecs
        if steps >= 80:
            first, last = (
                sum(sum(mine[0][part]) for mine in ranks) for part in (slice(5), slice(-5, None))
            )
            assert last < 0.7 * first, name
