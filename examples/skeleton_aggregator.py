"""A complete aggregator to copy: signs, times one magnitude that all ranks share.

    torchrun --nproc-per-node 2 examples/skeleton_aggregator.py

To write your own, copy this file, rename the class, and change `aggregate`: yield collectives, take
their results, return an average for each context. Requests of all parameters of a bucket in a round
share messages. State, checkpoints, error feedback and the checks between ranks are provided.
tests/examples/test_skeleton_aggregator.py shows the tests that an aggregator should pass;
docs/how-to/writing-an-aggregator.md explains the rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.aggregators import Aggregator, Averages, Context, StateSpec, Steps
from gradwire.collectives import AllReduce


@dataclass(frozen=True)
class Votes(Aggregator):
    """One byte per value: the sum of signs, times the mean magnitude over values, ranks and steps.

    Options:
        memory: weight of earlier steps in the mean magnitude, at least 0 and below 1.
    """

    memory: float = 0.9

    needs_feedback = True

    def __post_init__(self) -> None:
        if not 0 <= self.memory < 1:
            raise gw.ConfigError(f"Votes: memory={self.memory!r} must be at least 0 and below 1")

    def states(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        return {"size": StateSpec((1,), kind="replicated")}

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        if contexts[0].world_size > 127:
            raise gw.ConfigError(f"Votes: {contexts[0].world_size} ranks: the limit is 127")
        signs = [c.gradient.sign().to(torch.int8) for c in contexts]
        means = [c.gradient.abs().mean().view(1) for c in contexts]
        votes = [AllReduce(s.clone(), "sum", of=c) for s, c in zip(signs, contexts, strict=True)]
        sizes = [AllReduce(m, "avg", of=c) for m, c in zip(means, contexts, strict=True)]
        yield [*votes, *sizes]  # one round; results are in place
        averages, sent = [], []
        for c, sign, vote, mean in zip(contexts, signs, votes, means, strict=True):
            kept = c.state["size"]
            size = torch.where(kept > 0, self.memory * kept + (1 - self.memory) * mean, mean)
            torch.where(size.isfinite(), size, kept, out=kept)
            averages.append(vote.values * (size / c.world_size))
            sent.append(sign * size)
        return Averages(averages, sent)

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return math.prod(shape) + dtype.itemsize


def main() -> None:
    """Train with it, and print the compression ratio."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    handle = gw.attach(ddp, Votes())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    target = torch.randn(64, 64)
    inputs = torch.Generator().manual_seed(rank)  # every rank has its own data
    for step in range(101):
        x = torch.randn(32, 64, generator=inputs)
        loss = (ddp(x) - x @ target / 8).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")
    if rank == 0:
        print(f"{handle.stats()['ratio']:.1f} times less than fp32")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
