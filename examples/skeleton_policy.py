"""A complete policy to copy: from the most exact plan, it saves bytes where they cost least error.

    torchrun --nproc-per-node 2 examples/skeleton_policy.py

To write your own, copy this file, rename the class, and change `choose`: it gets a table per layer
(bytes and error of each choice) and the most that the plan may err, and returns a choice per layer,
or None if it finds none. Windows of averaged gradients, exchanges between ranks, adoption at the
same pass, the bounds (never above the budget, never more bytes than the uniform plan) and
checkpoints are provided. tests/examples/test_skeleton_policy.py shows the tests that a policy
should pass; docs/internals/adaptive.md defines errors, and docs/how-to/adaptive.md says how one is
used.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.controllers import Budget, Layer, Policy
from gradwire.controllers.error import terms, total

ROUNDING = 1e-12  # of the budget: what sums of floats may be off


@dataclass(frozen=True)
class Steepest(Policy):
    """Greedy: the saving with the most bytes per error comes first, until none fits any more.

    Options:
        spend: share of the budget that it may use, above 0 and at most 1.
    """

    spend: float = 1.0

    name = "steepest"

    def __post_init__(self) -> None:
        if not 0 < self.spend <= 1:
            raise gw.ConfigError(f"Steepest: spend={self.spend!r}: give a share above 0, at most 1")

    def choose(self, layers: Sequence[Layer], budget: Budget) -> Sequence[int] | None:
        found = [int(one.errors.argmin()) for one in layers]
        errors = [terms(one.errors, budget.metric) for one in layers]
        spent = total(float(err[at]) for err, at in zip(errors, found, strict=True))
        left = self.spend * budget.error - spent
        if left < 0:
            return None
        waiting = [
            (-gain, i, to)
            for i, one in enumerate(layers)
            for gain, to in savings(one, errors[i], found[i])
        ]
        heapq.heapify(waiting)
        while waiting:
            _, i, to = heapq.heappop(waiting)
            more = float(errors[i][to] - errors[i][found[i]])
            if (
                more < left - ROUNDING * budget.error
                and layers[i].nbytes[to] < layers[i].nbytes[found[i]]
            ):
                found[i], left = to, left - more
        return found


def savings(one: Layer, errors: Sequence[float], first: int) -> Iterator[tuple[float, int]]:
    """(bytes per error, choice) of every choice that is smaller than the first."""
    for to, nbytes in enumerate(one.nbytes):
        saved = float(one.nbytes[first] - nbytes) * one.weight
        if saved > 0:
            yield saved / max(float(errors[to] - errors[first]), 1e-30), to


def main() -> None:
    """Train with it, and print what it decided."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(),
        torch.nn.Linear(512, 64),
    )  # fmt: skip
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    often = gw.Replan(Steepest(), every=20, average=5)
    handle = gw.attach(ddp, "qsgd:bits=4", policy=often)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    target = torch.randn(64, 64)
    inputs = torch.Generator().manual_seed(rank)  # every rank has its own data
    for _ in range(101):
        x = torch.randn(32, 64, generator=inputs)
        loss = (ddp(x) - x @ target / 8).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        for decision in handle.history():
            print(f"pass {decision['pass']}: {decision['line']}")
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
