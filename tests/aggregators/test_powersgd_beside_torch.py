"""PowerSGD against torch's hook, from the same start vectors, step by step.

DDP reads a hook's annotations as objects, so this file does not postpone their evaluation.
"""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from gradwire.aggregators import PowerSGD
from products import one_in
from ranks import as_processes

SHAPES = [(12, 20), (33, 17), (50,), (12, 20), (8, 3, 3, 3), (2, 3), (40, 64), (12, 20)]
PLAIN_STEPS = 2  # torch's least, with a warm start


class Prescribed(nn.Module):
    """A model with given gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return sum(((p * g).sum() for p, g in pairs), torch.zeros(()))


def step(model: nn.Module, number: int) -> list[torch.Tensor]:
    """The averages of gradients that shrink, as in training. Where they do not, error feedback
    turns power iterations round all the time, and the last bits of one step are digits of a later
    one."""
    gradients = []
    for at, shape in enumerate(SHAPES):
        made = torch.Generator().manual_seed(at)  # equal on all ranks
        matrix = torch.randn(shape, generator=made).view(shape[0], -1)
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        s = 0.6**number * 0.6 ** torch.arange(len(s)) * (1 + 0.5 * dist.get_rank())
        own = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        noise = torch.randn(shape, generator=own)
        gradients.append((u * s @ v).view(shape) + 0.003 * 0.6**number * noise)
    model.zero_grad()
    model(gradients).backward()
    return [p.grad.clone() for p in model.parameters()]


def agrees_with_torch(rank: int, columns: int) -> tuple[float, float]:
    """Over all steps and parameters: (the largest relative distance between the accumulated
    averages; the least norm of the residual)."""
    state = torch_hook.PowerSGDState(
        None, matrix_approximation_rank=columns, start_powerSGD_iter=PLAIN_STEPS,
        min_compression_rate=1,
    )  # fmt: skip
    theirs, ours = DDP(Prescribed()), DDP(Prescribed())
    shrinks = PowerSGD(columns).shrinks
    names = {p: name for name, p in theirs.module.named_parameters()}
    bases: dict[str, torch.Tensor] = {}

    def hook(given: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if given.iter == PLAIN_STEPS:
            # torch's state between steps: matrices of one shape in one tensor, in order.
            by_shape: dict[tuple[int, int], list[str]] = {}
            for p in bucket.parameters():
                if shrinks(tuple(p.shape)):
                    shape = p.shape[0], math.prod(p.shape[1:])
                    by_shape.setdefault(shape, []).append(names[p])
            order = [(shape, name) for shape, group in by_shape.items() for name in group]
            given.q_memory_dict[bucket.index()] = torch.cat([bases[n].view(-1) for _, n in order])
            given.p_memory_dict[bucket.index()] = torch.empty(
                columns * sum(shape[0] for shape, _ in order)
            )
        return torch_hook.powerSGD_hook(given, bucket)

    theirs.register_comm_hook(state, hook)
    plain = gw.attach(ours, None)
    for number in range(PLAIN_STEPS):
        for mine, other in zip(step(ours, number), step(theirs, number), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    plain.detach()
    handle = gw.attach(ours, "powersgd", rank=columns)
    for p in handle.plan.parameters:
        if shrinks(p.shape):
            made = torch.Generator().manual_seed(len(bases))
            bases[p.name] = torch.randn(math.prod(p.shape[1:]), columns, generator=made)
    assert len(bases) >= 5
    begin = {name: {"basis": basis} for name, basis in bases.items()}
    handle.load_state_dict({**handle.state_dict(), "aggregators": begin})
    farthest, least = 0.0, math.inf
    ways = [[torch.zeros(shape) for shape in SHAPES] for _ in range(2)]
    for number in range(PLAIN_STEPS, PLAIN_STEPS + 12):
        found = zip(step(ours, number), step(theirs, number), *ways, strict=True)
        for mine, other, our_way, their_way in found:
            our_way += mine
            their_way += other
            farthest = max(farthest, float((our_way - their_way).norm() / their_way.norm()))
        kept = handle.state_dict()["aggregators"]
        least = min(least, *(float(kept[name]["residual"].norm()) for name in bases))
    return farthest, least


@pytest.mark.multiprocess
@pytest.mark.parametrize(("ranks", "columns"), one_in(6, product([2, 3], [2, 1, 4])))
def test_it_agrees_with_torch(ranks: int, columns: int) -> None:
    for farthest, left_out in as_processes(ranks, agrees_with_torch, columns):
        assert farthest < 1e-4
        assert left_out > 1e-6, "nothing was compressed"
