"""Global top-k (UTIL 3.1.1): the largest values of the ranks' sum, known only once it is computed.

Over the n values of all parameters, with k = max(1, floor(density * n)):

    1. all-reduce the error-fed gradients, whole and in fp32
    2. keep the k largest magnitudes of their average, the same on all ranks, since they have the
       same average; of equal ones, those of the first parameter by name, in it the first

The average is zero elsewhere. Each rank's residual keeps its own values at the other positions, so
nothing is lost.

It saves no bytes: payload bytes per rank and step are 4 n. It bounds the accuracy of sparse methods
that keep as many values of the average: those choose positions by what a rank, or a chunk's norm,
knows of the sum.

A value of the average that is not finite is kept, with the k largest, and no residual changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.aggregators import selection
from gradwire.aggregators.local import keep_residual, with_residual
from gradwire.aggregators.protocol import Aggregator, Context, Steps
from gradwire.codecs import checks
from gradwire.collectives import AllReduce
from gradwire.lang import Codec


@dataclass(frozen=True)
class GlobalTopK(Aggregator):
    """The k largest values of the average over all parameters: a bound on the accuracy of
    sparsifiers, which sends dense fp32, after backward ends.

    Args:
        density: the share of values that is kept, above 0 and at most 1.
    """

    density: float = 0.01

    scope = "model"
    feeds_back = True
    needs_feedback = True

    def __post_init__(self) -> None:
        checks.number(self, "density", above=0, most=1)

    @property
    def encoders(self) -> tuple[Codec, ...]:
        return (selection.Positions(self.density),)

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        contexts, given = sorted(contexts, key=lambda c: c.name), contexts  # DDP's order changes
        fed = [with_residual(c) for c in contexts]
        means = yield [AllReduce(f.clone(), of=c) for f, c in zip(fed, contexts, strict=True)]

        mean = torch.cat(means)
        finite = mean.isfinite()
        packed = selection.pack(mean, self.density)
        kept = ~finite
        kept[selection.unpack(packed, self.density, len(mean))] = True
        places = kept.split([len(f) for f in fed])
        averages = {}
        for c, f, average, at in zip(contexts, fed, means, places, strict=True):
            averages[id(c)] = torch.where(at, average, 0.0)
            if c.residual is not None:
                keep_residual(c, finite.all(), f.masked_fill_(at, 0.0))
        return [averages[id(c)] for c in given]

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return 4 * math.prod(shape)

    def recorded(self) -> str:
        return f"globaltopk(density={self.density:g})"
