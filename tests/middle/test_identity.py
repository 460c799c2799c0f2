"""A message's identity depends neither on when it arrives, nor on what else is in flight."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from averaging import started
from gradwire.aggregators import Attached
from gradwire.groups import communicator
from gradwire.lang import rng
from ranks import at_once, on
from stress.running import Chained
from stress.worlds import of_transport
from training import mlp

# `make test` has one of them.
WORLDS = [(3, False), (3, True), (2, False), (2, True)]
pytestmark = [
    pytest.mark.multiprocess,
    *(on(n, environment=of_transport(shm), exhaustive=(n, shm) != (3, False)) for n, shm in WORLDS),
]


BUCKETS = 6
LIMIT = timedelta(seconds=60)


def normal(numel: int, *seed: int) -> torch.Tensor:
    mixed = sum(part * 1000**at for at, part in enumerate(seed))
    return torch.randn(numel, generator=torch.Generator().manual_seed(mixed))


# ---- rounds of several buckets at once


def test_rounds_of_buckets_overtake_each_other(rank: int) -> None:
    for window in (1, 2):
        group = dist.new_group(timeout=LIMIT)
        two_rounds_of(group, rank, window)
        dist.destroy_process_group(group)


def two_rounds_of(group: dist.ProcessGroup, rank: int, window: int) -> None:
    """Rank 0 issues its buckets slowly: it has the second round of one before the next bucket."""
    owner, size = communicator(group).owner("owner", window=window), dist.get_world_size()
    # each has all sizes, in a different order: a message in the wrong place has a wrong size
    numels = [100 * (b + 1) for b in range(BUCKETS)]
    members = [
        Attached(
            f"p{b}",
            (numel,),
            Chained(tuple((n, "identity", "all_reduce") for n in (numel, numel // 2))),
            rng.parameter_keys(0, f"p{b}", rank),
        )
        for b, numel in enumerate(numels)
    ]
    for step in range(5):
        gradients = [normal(n, rank, step, b) for b, n in enumerate(numels)]
        running = []
        for b in range(BUCKETS):
            running.append(started(owner, [members[b]], [gradients[b]]))
            if rank == 0:
                time.sleep(0.01)
        for b, future in enumerate(running):
            future.result(60)
            expected = sum(normal(numels[b], r, step, b) for r in range(size)) / size
            torch.testing.assert_close(gradients[b], expected)


# ---- two modules and a user's calls, over one group


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


def test_two_modules_and_calls_over_one_group(rank: int) -> None:
    """From the fourth step on, the modules' buckets come in a different order on each rank."""
    models = [DDP(mlp(20, 50 + seed, 40, 10, seed=seed), bucket_cap_mb=0.002) for seed in range(2)]
    plain = [DDP(mlp(20, 50 + seed, 40, 10, seed=seed), bucket_cap_mb=0.002) for seed in range(2)]
    for model in models:
        gw.attach(model, codec=None, coalesce_bytes=0)
    meter = Meter()
    for step in range(8):
        x = normal(4 * 20, rank, step).view(4, 20)
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


def test_a_bucket_and_a_call_change_places(rank: int) -> None:
    """A module's bucket and a call of the user's change places between ranks."""
    group = dist.new_group(timeout=LIMIT)
    owner = communicator(group).owner("owner")
    keys = rng.parameter_keys(0, "p", rank)
    member = Attached("p", (5000,), Chained(((5000, "identity", "all_reduce"),)), keys)
    for step in range(10):
        gradient, values = torch.full((5000,), float(rank)), torch.full((300,), float(rank))
        acts = {
            "bucket": partial(started, owner, [member], [gradient]),
            "call": partial(
                gw.all_reduce, values, "identity", group=group, async_op=True, step=step
            ),
        }
        first = "bucket" if (step + rank) % 2 or not step else "call"
        begun = {name: acts[name]() for name in sorted(acts, key=lambda name: name != first)}
        begun["bucket"].result(60)  # type: ignore[union-attr]
        begun["call"].wait()  # type: ignore[union-attr]
        size = dist.get_world_size()
        assert torch.equal(gradient, torch.full((5000,), (size - 1) / 2))
        assert torch.equal(values, torch.full((300,), size * (size - 1) / 2))


def test_threads_call_on_two_groups(rank: int) -> None:
    """Calls of two threads on two groups, each in order."""
    groups = [dist.new_group(timeout=LIMIT) for _ in range(2)]
    size = dist.get_world_size()

    def body(at: int) -> None:
        for step in range(30):
            values = torch.full((100 + 50 * at,), float(rank + step))
            gw.all_reduce(values, "identity", group=groups[at], step=step)
            expected = size * step + size * (size - 1) / 2
            assert torch.equal(values, torch.full_like(values, expected))

    at_once(*(partial(body, at) for at in ((0, 1) if rank == 0 else (1, 0))))
