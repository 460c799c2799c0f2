"""Backward passes of attached modules that end early, detach, or follow a restored checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from transports import over_both

import gradwire as gw
from ranks import on, raises_alone
from stress.worlds import of_transport
from training import batch, flat, gradients, mlp, same_everywhere

pytestmark = [pytest.mark.multiprocess, *over_both(2)]


# A failure that only this timeout of the groups ends was not noticed: ranks hang by then.
LIMIT = timedelta(seconds=200)


def net(seed: int = 0) -> nn.Sequential:
    return mlp(20, 60, 60, 30, seed=seed)


def train(models: list[nn.Module], steps: range) -> None:
    """All models in one backward; plain SGD."""
    parameters = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        sum(model(batch(step)).square().mean() for model in models).backward()
        optimizer.step()


def in_backward(tensor: torch.Tensor, action: Callable[[], None]) -> None:
    """Run `action` when backward reaches `tensor`."""
    handle: Any = None

    def once(gradient: torch.Tensor) -> None:
        handle.remove()
        action()

    handle = tensor.register_hook(once)


# ---- an exception in one rank's backward


@on(3, environment=of_transport(True))
@on(3, environment=of_transport(False), exhaustive=True)
def test_an_exception_in_one_ranks_backward(rank: int) -> None:
    """Rank 1 raises in the backward of step 4, which it catches; all others raise an error that
    names the rank, long before the timeout."""

    def fail() -> None:
        raise ValueError("a user's hook fails")

    for where, modules, coalesce in (
        ("in its middle", 1, 0), ("at its start", 1, 1 << 18), ("in its middle", 2, 0)
    ):  # fmt: skip
        group = dist.new_group(timeout=LIMIT)
        models = [DDP(net(m), bucket_cap_mb=0.005, process_group=group) for m in range(modules)]
        for model in models:
            gw.attach(model, options=gw.Options(coalesce_bytes=coalesce))
        train(models, range(4))
        dist.barrier()
        outputs = [model(batch(4)) for model in models]
        if rank == 1:
            in_backward(outputs[0] if where == "at its start" else models[0].module[2].weight, fail)
        backward = sum(output.square().mean() for output in outputs).backward
        raises_alone(rank, 1, ValueError, backward, "rank 1", "backward", "step")
        dist.barrier()


def test_an_exception_on_every_rank_is_each_ranks_own(rank: int) -> None:
    """Every rank's backward fails at one place, as with a bad batch: training may go on."""
    model = DDP(net(), bucket_cap_mb=0.005)
    gw.attach(model, options=gw.Options(coalesce_bytes=0))
    train([model], range(2))

    def fail() -> None:
        raise ValueError("a bad batch")

    output = model(batch(2))
    in_backward(output, fail)
    with pytest.raises(ValueError, match="a bad batch"):
        output.square().mean().backward()


# ---- detach inside backward


def test_detach_inside_backward_takes_effect_at_its_end(rank: int) -> None:
    for coalesce in (0, 1 << 18):
        model, plain = DDP(net(), bucket_cap_mb=0.005), DDP(net(), bucket_cap_mb=0.005)
        handle = gw.attach(model, "qsgd", bits=8, options=gw.Options(coalesce_bytes=coalesce))
        train([model], range(3))
        train([plain], range(3))
        output = model(batch(3))
        model.zero_grad()
        in_backward(model.module[2].weight, handle.detach)
        output.square().mean().backward()
        assert same_everywhere(gradients(model))
        sent = handle.stats()["wire_bytes"]
        # From the next pass on it averages plainly.
        with torch.no_grad():
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                q.copy_(p)
        train([model], range(4, 6))
        train([plain], range(4, 6))
        assert torch.equal(flat(model), flat(plain))
        assert (handle.stats()["steps"], handle.stats()["wire_bytes"]) == (4, sent)
        gw.attach(model)  # anew
        train([model], range(6, 8))
        assert same_everywhere(flat(model))


# ---- DDP's options, with two modules over one group


class Branches(nn.Module):
    """Uses one of two layers, depending on its input: the other gets no gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.left, self.right, self.head = nn.Linear(20, 60), nn.Linear(20, 60), nn.Linear(60, 30)
        self.steps = seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.head(self.left(x) if self.steps % 2 else self.right(x))


WAYS: dict[str, dict[str, Any]] = {
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "rebuilt buckets": {},
    "views": {"gradient_as_bucket_view": True},
}


def test_two_modules_of_ddps_own_ways(rank: int) -> None:
    for way in WAYS:
        for codec in (None, "qsgd") if way == "rebuilt buckets" else (None,):
            try:
                pairs(way, codec)
            except BaseException as error:
                raise AssertionError(f"{way}, {codec}: {error}") from error


def pairs(way: str, codec: str | None) -> None:
    """Two modules in one backward, while DDP rebuilds buckets; uncompressed, they train as DDP
    does."""
    branches = way == "find_unused_parameters"

    def pair() -> list[nn.Module]:
        return [
            DDP(Branches(m) if branches else net(m), bucket_cap_mb=0.005, **WAYS[way])
            for m in range(2)
        ]

    models = pair()
    handles = [
        gw.attach(m, codec, options=gw.Options(coalesce_bytes=c))
        for m, c in zip(models, (0, 1 << 18), strict=True)
    ]
    train(models, range(6))
    assert same_everywhere(flat(*models))
    assert [handle.stats()["steps"] for handle in handles] == [6, 6]
    if codec is None:
        plain = pair()
        train(plain, range(6))
        torch.testing.assert_close(flat(*models), flat(*plain), rtol=1e-5, atol=1e-6)


# ---- going back


def test_a_checkpoint_is_restored_while_identities_go_on(rank: int) -> None:
    """A checkpoint in memory, restored in one of two modules while the other goes on."""
    models = [DDP(net(m), bucket_cap_mb=0.005) for m in range(2)]
    handles = [
        gw.attach(model, "qsgd", bits=2, error_feedback=True, options=gw.Options(coalesce_bytes=c))
        for model, c in zip(models, (0, 1 << 18), strict=True)
    ]
    train(models, range(3))
    kept = {k: v.clone() for k, v in models[0].module.state_dict().items()}, handles[0].state_dict()
    train(models, range(3, 6))
    first, other = flat(models[0]), flat(models[1])
    for again in range(3):
        models[0].module.load_state_dict(kept[0])
        handles[0].load_state_dict(kept[1])
        train(models, range(3, 6))
        assert torch.equal(flat(models[0]), first), f"time {again}"
        assert same_everywhere(flat(*models))
        assert not torch.equal(flat(models[1]), other)
        other = flat(models[1])


# ---- and a user's calls


class Meter:
    """All-reduces of the user's own, started in the middle of backward."""

    def __init__(self) -> None:
        self.calls = 0
        self.running: list[tuple[int, torch.Tensor, object]] = []

    def __call__(self, _: torch.Tensor) -> None:
        number, self.calls = self.calls, self.calls + 1
        values = torch.full((777 + number % 3,), float(dist.get_rank() + number))
        future = gw.all_reduce(values, "identity", async_op=True, step=number)
        self.running.append((number, values, future))

    def check(self) -> None:
        size = dist.get_world_size()
        for number, values, future in self.running:
            future.wait()  # type: ignore[attr-defined]
            expected = number * size + size * (size - 1) / 2
            assert torch.equal(values, torch.full_like(values, expected))
        self.running.clear()


@on(3, environment=of_transport(True))
@on((2, 3), environment=of_transport(False), exhaustive=True)
def test_two_modules_and_calls_over_one_group(rank: int) -> None:
    """From the fourth step on, the modules' buckets come in a different order on each rank."""
    models = [DDP(mlp(20, 50 + seed, 40, 10, seed=seed), bucket_cap_mb=0.002) for seed in range(2)]
    plain = [DDP(mlp(20, 50 + seed, 40, 10, seed=seed), bucket_cap_mb=0.002) for seed in range(2)]
    for model in models:
        gw.attach(model, codec=None, options=gw.Options(coalesce_bytes=0))
    meter = Meter()
    for step in range(8):
        x = batch(step, 4)
        for each, calls in ((models, meter), (plain, None)):
            order = [0, 1] if step < 3 or rank == 0 else [1, 0]
            losses: dict[int, torch.Tensor] = {}
            for at in order:
                hidden = each[at](x)
                if calls is not None:
                    hidden.register_hook(calls)
                losses[at] = hidden.square().mean()
            for model in each:
                model.zero_grad()
            if calls is not None:
                torch.stack(list(losses.values())).sum().backward()
                continue
            for at in range(2):  # torch's own all-reduces need one order
                losses[at].backward()
        meter.check()
        for model, reference in zip(models, plain, strict=True):
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)
