"""ARTopK (ARTOPK Alg. 1, STAR): all ranks send their values at one rank's top-k indices.

Per parameter of n values, with k = max(1, floor(density * n)), in step t, of N ranks:

    1. the leader, rank t modulo N, selects the indices of its k largest values; broadcast them
    2. all-reduce the values at these indices

So the payload is compatible with all-reduce: k indices, broadcast once, and k values. The average
is zero elsewhere; error feedback keeps the rest. A rank whose gradient has non-finite values sends
NaN at all k indices, so that no rank's average is finite. Payload bytes per rank and step: 4 k of
indices and 4 k of values; two rounds per scope.
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
    """All-reduce at the leader's top-k indices; the leader rotates.

    Args:
        density: the share of values that is sent, above 0 and at most 1.
    """

    density: float = 0.01

    needs_feedback = True

    def __post_init__(self) -> None:
        if not isinstance(self.density, (int, float)) or not 0 < self.density <= 1:
            raise ConfigError(f"density={self.density!r}: give a number above 0 and at most 1")

    def entries(self, numel: int) -> int:
        """The number of values that are sent, of `numel`."""
        return min(max(1, math.floor(self.density * numel)), numel)

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        chosen = []
        for c in contexts:
            k, leads = self.entries(c.gradient.numel()), c.step % c.world_size == c.rank
            top = largest(c.gradient, k) if leads else torch.zeros(k, dtype=torch.int64)
            chosen.append(top.to(c.gradient.device, torch.int32))
        yield [
            Broadcast(top, c.step % c.world_size, of=c)
            for c, top in zip(contexts, chosen, strict=True)
        ]
        indices = [top.long() for top in chosen]
        mine = [_gathered(c.gradient, at) for c, at in zip(contexts, indices, strict=True)]
        means = yield [
            AllReduce(values.clone(), of=c) for c, values in zip(contexts, mine, strict=True)
        ]
        return Averages(_scattered(contexts, indices, means), _scattered(contexts, indices, mine))

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return self.entries(math.prod(shape)) * (4 + dtype.itemsize)

    def __str__(self) -> str:
        return f"artopk(density={self.density:g})"


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """The indices of the k values of largest magnitude, ascending; ties go to the lower index.

    Non-finite values count as largest.
    """
    if not k:
        return values.new_empty(0, dtype=torch.int64)
    size = torch.where(values.isfinite(), values.abs(), torch.inf)
    threshold = size.kthvalue(size.numel() - k + 1).values
    above = (size > threshold).nonzero().view(-1)
    equal = (size == threshold).nonzero().view(-1)[: k - above.numel()]
    return torch.cat([above, equal]).sort().values


def _gathered(gradient: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The values at the indices `at`; all NaN if any value of the gradient is not finite, so that
    non-finite values at other indices reach every rank."""
    return torch.where(gradient.isfinite().all(), gradient[at], torch.nan)


def _scattered(
    contexts: Sequence[Context], indices: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Each parameter's values at its indices, and zero elsewhere."""
    found = []
    for c, at, kept in zip(contexts, indices, values, strict=True):
        found.append(torch.zeros_like(c.gradient).index_copy_(0, at, kept))
    return found
