"""ARTopK (ARTOPK Alg. 1, STAR): all ranks send the values at one rank's largest.

Per parameter of n values, with k = max(1, floor(density * n)), in step t, of N ranks:

    1. the leader, rank t modulo N, takes the places of its k largest values; broadcast them
    2. all-reduce the values there

So the payload is all-reduce compatible: k places, once, and k values. The average is zero
elsewhere; error feedback keeps the rest. A rank whose gradient has values that are not finite sends
NaN at all k places, and so no rank's average is finite. Payload bytes per rank and step: 4 k of
places and 4 k of values; two rounds per scope.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.aggregators.protocol import Aggregator, Averages, Context, Steps
from gradwire.collectives import AllReduce, Broadcast
from gradwire.errors import ConfigError


@dataclass(frozen=True)
class ARTopK(Aggregator):
    """The leader's top-k, leaders taking turns.

    Args:
        density: the share of values that are sent, above 0 and at most 1.
    """

    density: float = 0.01

    needs_feedback = True

    def __post_init__(self) -> None:
        if not isinstance(self.density, (int, float)) or not 0 < self.density <= 1:
            raise ConfigError(f"density={self.density!r}: a number above 0 and at most 1")

    def entries(self, numel: int) -> int:
        """How many of so many values are sent."""
        return min(max(1, math.floor(self.density * numel)), numel)

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        places = []
        for c in contexts:
            k, leads = self.entries(c.gradient.numel()), c.step % c.world_size == c.rank
            chosen = largest(c.gradient, k) if leads else torch.zeros(k, dtype=torch.int64)
            places.append(chosen.to(c.gradient.device, torch.int32))
        yield [
            Broadcast(chosen, c.step % c.world_size, of=c)
            for c, chosen in zip(contexts, places, strict=True)
        ]
        where = [chosen.long() for chosen in places]
        mine = [_taken(c.gradient, at) for c, at in zip(contexts, where, strict=True)]
        means = yield [
            AllReduce(values.clone(), of=c) for c, values in zip(contexts, mine, strict=True)
        ]
        return Averages(_at(contexts, where, means), _at(contexts, where, mine))

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return self.entries(math.prod(shape)) * (4 + dtype.itemsize)

    def __str__(self) -> str:
        return f"artopk(density={self.density:g})"


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Places of the k values of largest magnitude, ascending; of equal ones the lowest come first.

    What is not finite counts as largest.
    """
    if not k:
        return values.new_empty(0, dtype=torch.int64)
    size = torch.where(values.isfinite(), values.abs(), torch.inf)
    threshold = size.kthvalue(size.numel() - k + 1).values
    above = (size > threshold).nonzero().view(-1)
    equal = (size == threshold).nonzero().view(-1)[: k - above.numel()]
    return torch.cat([above, equal]).sort().values


def _taken(gradient: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The values at some places; all NaN if any value is not finite, here or elsewhere, so that
    every rank learns of it though the leader has chosen other places."""
    return torch.where(gradient.isfinite().all(), gradient[at], torch.nan)


def _at(
    contexts: Sequence[Context], where: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Each parameter's values at some places, and zero elsewhere."""
    found = []
    for c, at, held in zip(contexts, where, values, strict=True):
        found.append(torch.zeros_like(c.gradient).index_copy_(0, at, held))
    return found
