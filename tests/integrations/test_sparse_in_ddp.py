"""Sparse aggregators in DDP: accumulation, unused parameters, fp16 gradients under a scaler, and
state that resumes to the same bits and moves to another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from products import one_in
from ranks import as_processes

pytestmark = pytest.mark.multiprocess

METHODS: dict[str, str] = {  # a clipping norm is of scaled gradients
    "artopk": "artopk:density=0.05",
    "lwtopk": "lwtopk:density=0.05",
    "artopk auto": "artopk:density=0.05:leader=auto:scope=model",
    "globaltopk": "globaltopk:density=0.05",
    "dgc": "dgc:density=0.05:momentum=0.5:warmup=3:clip=5000",
    "artopk by variance": "artopk:density=0.05:leader=variance",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(map(nn.Linear, [20, 60, 50], [60, 50, 4]))
        self.spare = nn.Linear(50, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        out: torch.Tensor = self.layers[-1](x)
        return out


def made(method: str, dtype: torch.dtype = torch.float32) -> tuple[DDP, gw.Handle]:
    net = Net().to(dtype)
    model = DDP(net, bucket_cap_mb=0.01, find_unused_parameters=True)
    return model, gw.attach(model, method, coalesce_bytes=0)


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    target = torch.randn(20, 4, generator=torch.Generator().manual_seed(7)) / 5
    return (model(x.to(dtype)).float() - x @ target).square().mean()


def trained(model: DDP, steps: range) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in steps:
        model.zero_grad()
        loss = loss_of(model, inputs(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def alike(values: torch.Tensor) -> bool:
    found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(found, values)
    return all(torch.equal(found[0], other) for other in found)


def accumulates_with_no_sync(method: str, _: Path) -> None:
    """Two batches without synchronisation, then one with it, are the sum's gradient."""
    found = []
    for apart in (True, False):
        model, handle = made(method)
        for step in range(3):
            model.zero_grad()
            x = [inputs(3 * step + part, dist.get_rank()) for part in range(3)]
            if apart:
                with model.no_sync():
                    for part in x[:2]:
                        loss_of(model, part).backward()
                loss_of(model, x[2]).backward()
            else:
                torch.stack([loss_of(model, part) for part in x]).sum().backward()
        assert handle.stats()["steps"] == 3
        found.append(torch.cat([p.grad.reshape(-1) for p in model.module.layers.parameters()]))
        assert alike(found[-1])
        handle.detach()
    # Selections over nearly equal values may differ in few places.
    assert (found[0] - found[1]).abs().gt(1e-5).float().mean() < 0.01


def unused_parameters_are_averaged(method: str, _: Path) -> None:
    """Rank 0 uses all parameters, the others not the spare ones."""
    model, handle = made(method)
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        model.zero_grad()
        loss_of(model, inputs(step, rank)).backward()
        optimizer.step()
    assert alike(flat(model))
    assert (
        not handle.state_dict()["aggregators"]["spare.weight"]
        .get("residual", 0 * flat(model))
        .any()
    )
    handle.detach()


def fp16_gradients_under_a_scaler(method: str, _: Path) -> None:
    """As GradScaler does it, which takes no fp16 gradients itself: a scale, halved when a gradient
    is not finite. Such a step is skipped on all ranks, and state stays finite."""
    model, handle = made(method, torch.float16)
    rank, scale, losses, skipped = dist.get_rank(), 1024.0, [], []
    master = [p.detach().float().clone() for p in model.parameters()]
    for step in range(60):
        model.zero_grad()
        loss = loss_of(model, inputs(step, rank))
        losses.append(loss.item())
        (loss * (torch.inf if (step, rank) == (5, 1) else scale)).backward()
        grads = [p.grad for p in model.parameters()]
        if not all(g.isfinite().all() for g in grads if g is not None):
            skipped.append(step)
            scale /= 2
            continue
        with torch.no_grad():
            for weight, p in zip(master, model.parameters(), strict=True):
                if p.grad is not None:
                    weight -= 0.05 / scale * p.grad.float()
                    p.copy_(weight)
    assert skipped == [5]
    assert alike(flat(model))
    states = handle.state_dict()["aggregators"]
    assert all(t.isfinite().all() for kept in states.values() for t in kept.values())
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    handle.detach()


def a_scaler_skips_what_is_not_finite(method: str, _: Path) -> None:
    """torch's GradScaler over fp32 gradients."""
    model, handle = made(method)
    rank, scaler = dist.get_rank(), torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(8):
        model.zero_grad()
        loss = loss_of(model, inputs(step, rank))
        scaler.scale(loss * (torch.inf if (step, rank) == (3, 0) else 1)).backward()
        before = flat(model)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, flat(model)) == (step == 3)
    assert scaler.get_scale() == 128.0
    assert alike(flat(model))
    handle.detach()


def resumes_to_the_same_bits(method: str, folder: Path) -> None:
    """From a file of this rank's; and from one of all ranks' at one rank less, nothing is lost."""
    model, handle = made(method)
    trained(model, range(5))
    path = folder / f"{method.replace(':', '_')} {dist.get_rank()}.pt"
    torch.save({"model": model.state_dict(), "gradwire": handle.state_dict()}, path)
    whole = handle.full_state_dict()
    trained(model, range(5, 9))
    expected = flat(model)
    handle.detach()
    again, other = made(method)
    saved = torch.load(path)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["gradwire"])
    trained(again, range(5, 9))
    assert torch.equal(flat(again), expected)
    other.detach()
    some = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        fewer = DDP(Net(), process_group=some, find_unused_parameters=True)
        moved = gw.attach(fewer, method, coalesce_bytes=0)
        moved.load_state_dict(whole)
        mine = moved.full_state_dict()
        for name in ("residual", "velocity"):
            for key, kept in whole["ranks"][0]["aggregators"].items():
                if name in kept:
                    means = [
                        sum(one["aggregators"][key][name] for one in state["ranks"])
                        / state["world_size"]
                        for state in (whole, mine)
                    ]
                    torch.testing.assert_close(*means)
        fewer.zero_grad()
        loss_of(fewer, inputs(9, dist.get_rank())).backward()
        moved.detach()


def is_adopted_during_training(method: str, _: Path) -> None:
    """A rehearsal prepares it; a residual of the codec before is not lost."""
    model, handle = made("topk:density=0.05")
    handle.update(error_feedback=True).wait()
    trained(model, range(4))
    assert handle.plan.version == 1
    handle.update(method).wait()
    trained(model, range(4, 10))
    assert handle.plan.version == 2
    assert alike(flat(model))
    handle.detach()


SCENARIOS: list[Callable[[str, Path], None]] = [
    accumulates_with_no_sync,
    unused_parameters_are_averaged,
    fp16_gradients_under_a_scaler,
    a_scaler_skips_what_is_not_finite,
    resumes_to_the_same_bits,
    is_adopted_during_training,
]


def run(rank: int, method: str, folder: Path) -> None:
    for scenario in SCENARIOS:
        scenario(method, folder)
        dist.barrier()


@pytest.mark.parametrize("method", one_in(2, METHODS))
def test_they_serve_training(method: str, tmp_path: Path) -> None:
    as_processes(3, run, METHODS[method], tmp_path)


def leads(rank: int) -> list[Any]:
    """Rank 1's inputs are four times as large, so its gradients are larger."""
    model, handle = made("artopk:density=0.05:leader=variance")
    found = []
    for step in range(5):
        model.zero_grad()
        loss_of(model, inputs(step, rank) * (4 if rank == 1 else 1)).backward()
        members = handle._members
        weights = [members[f"layers.{layer}.weight"] for layer in range(3)]
        found.append([int(member.metrics["leader"]) for member in weights])
    handle.detach()
    return found


def test_by_variance_the_rank_of_largest_norm_leads() -> None:
    for found in as_processes(3, leads):
        assert found == [[1, 1, 1]] * 5


def told(rank: int) -> dict[str, tuple[int, int]]:
    """The bytes that a handle expects of a step, and those of a step."""
    found = {}
    for method in ("lwtopk:density=0.05", "globaltopk:density=0.05", "dgc:density=0.1:warmup=1"):
        model = DDP(Net(), find_unused_parameters=True)
        handle = gw.attach(model, method)
        for step in range(2):
            before = handle.stats()["wire_bytes"]
            line = next(row for row in str(handle).splitlines() if "expected" in row)
            expected = int(line.split("about ")[1].split()[0].replace(",", ""))
            loss_of(model, inputs(0, rank)).backward()
            found[f"{method} {step}"] = expected, handle.stats()["wire_bytes"] - before
        handle.detach()
    return found


def test_the_summary_expects_what_is_sent_during_warm_up_too() -> None:
    found = as_processes(3, told)[0]
    for method, (expected, sent) in found.items():
        assert abs(expected - sent) < 0.1 * sent, method
    assert found["dgc:density=0.1:warmup=1 0"][1] > 1.5 * found["dgc:density=0.1:warmup=1 1"][1]
