"""ARTopK (ARTOPK Alg. 1): all ranks send their values at one rank's top-k positions.

Per selection over n values, with k = max(1, floor(density * n)), in step t, of N ranks:

    "round_robin" (STAR)                        "variance" (VAR), "auto"
    1. the leader, rank t modulo N, selects     1. every rank selects its k largest values and
       its k largest values                        all-gathers their squared norm
                                                2. all know the leader: the largest score
    2. broadcast the leader's positions         3. all-reduce the leader's positions: bytes, to
                                                   which the other ranks add zeros
    3. all-reduce the values there              4. all-reduce the values there

The score of VAR is the squared norm. That of "auto" (ours) is

    squared norm * (1 + steps since the rank led)

so a rank leads with a frequency that follows its share of the squared norms: ranks with equal norms
take turns, as in STAR; a rank of much larger norm leads most steps, as in VAR; and none that has
something to send is left out for ever. There is no threshold to choose. Each rank keeps the steps
since it led (state "waited"); on another number of ranks, sums of these continue.

A broadcast's root is part of a layout that ranks must prepare: STAR has N of them, one for each
turn. Leaders that depend on data would be N to the power of the selections in a bucket. So there
the positions are a sum with one contribution: one layout, for twice a broadcast's bytes.

Parameters have gradients of unlike size, so a selection over all of them (the paper's fused
gradient) errs far less than one for each, of the same bytes: on recorded gradients of a small GPT
(density 0.01, 4 ranks, step 50) the squared error is .084 of the mean's square against .521, and
with error feedback .155 against .969 (docs/laboratory/benchmarks.md). It sends nothing before
backward ends.

The average is zero elsewhere. Nothing is lost: the residual keeps the values that are not sent, and
what fp16 rounds off those that are. A rank whose gradient has values that are not finite, or that
`values` cannot hold, sends NaN at all positions, so that no rank's average is finite, and no state
changes. If a residual is the reason, what cannot be held waits in it.

Payload bytes per rank and step: k v for values of v bytes, k p / 8 + 2 n / B for positions of p
bits in blocks of B values (log2 B = p; 11.6 bits per value at density 0.01 altogether), and 16 N
for norms. STAR takes two rounds per scope, the others three.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gradwire.aggregators import selection
from gradwire.aggregators.protocol import Aggregator, Context, StateSpec, Steps
from gradwire.codecs import Cast, checks
from gradwire.collectives import AllGather, AllReduce, Broadcast, Request
from gradwire.lang import Codec
from gradwire.lang.forms import FP16_END

LEADERS = ("round_robin", "variance", "auto")
SCOPES = ("layer", "bucket", "model")
_WAITED = "waited"
_CODECS = {"fp16": Cast("fp16"), "fp32": None}


@dataclass(frozen=True)
class ARTopK(Aggregator):
    """All-reduce at the leader's top-k positions.

    Args:
        density: the share of values that is sent, above 0 and at most 1.
        leader: "round_robin" (STAR), "variance" (VAR) or "auto"; see the module.
        scope: what one selection is over: "model", the paper's: all parameters, in the order of
            their names, after the last bucket of backward; "layer", each parameter by itself, while
            backward runs; "bucket", the parameters of a bucket, so that results depend on DDP's
            bucketing, which differs in the first step after a start.
        values: how values are sent, "fp16" or "fp32".

    With "variance" and "auto", `metrics` has the leader, and skew: the largest squared norm over
    the mean of all ranks.
    """

    density: float = 0.01
    leader: str = "round_robin"
    scope: str = "model"
    values: str = "fp16"

    feeds_back = True
    needs_feedback = True

    def __post_init__(self) -> None:
        checks.number(self, "density", above=0, most=1)
        checks.one_of(self, "leader", LEADERS)
        checks.one_of(self, "scope", SCOPES)
        checks.one_of(self, "values", _CODECS)

    def states(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        return {_WAITED: StateSpec((1,))} if self.leader == "auto" else {}

    def variant(self, step: int, world_size: int) -> int:
        return step % world_size if self.leader == "round_robin" else 0

    @property
    def encoders(self) -> tuple[Codec, ...]:
        return (selection.Positions(self.density),)

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        groups = [[c] for c in contexts]
        if self.scope != "layer":  # DDP's order changes
            groups = [sorted(contexts, key=lambda c: c.name)]
        chosen = [_Selection(group, self.density) for group in groups]
        if self.leader == "round_robin":
            yield [s.led_by(s.first.step % s.first.world_size) for s in chosen]
        else:
            scores = yield [s.score() for s in chosen]
            yield [
                s.led_by_best(found, self.leader) for s, found in zip(chosen, scores, strict=True)
            ]
        codec = _CODECS[self.values]
        means = yield [s.values(codec) for s in chosen]
        averages = {}
        for s, mean in zip(chosen, means, strict=True):
            parts = s.finish(mean)
            averages.update({id(c): part for c, part in zip(s.contexts, parts, strict=True)})
        return [averages[id(c)] for c in contexts]

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        numel, itemsize = math.prod(shape), 2 if self.values == "fp16" else 4
        positions = selection.packed_nbytes(self.density, numel)
        return positions + selection.count(self.density, numel) * itemsize

    def recorded(self) -> str:
        return (
            f"artopk(density={self.density:g}, leader={self.leader}, scope={self.scope}, "
            f"values={self.values})"
        )


class _Selection:
    """One selection over the error-fed gradients of its parameters."""

    def __init__(self, contexts: Sequence[Context], density: float) -> None:
        self.contexts = contexts
        self.first = contexts[0]
        self.density = density
        fed = [
            c.gradient.float() if c.residual is None else c.gradient + c.residual for c in contexts
        ]
        self.fed = _joined(fed)  # float32[n]
        self.packed = self.fed.new_empty(0, dtype=torch.uint8)  # the leader's positions
        self.at = self.fed.new_empty(0, dtype=torch.int64)  # int64[k], unpacked
        self.error = self.fed.new_zeros(selection.count(density, self.fed.numel()))
        self.leader: torch.Tensor | None = None

    def led_by(self, root: int) -> Request:
        """The broadcast of a known leader's positions."""
        if self.first.rank == root:
            self.packed = selection.pack(self.fed, self.density)
        else:
            nbytes = selection.packed_nbytes(self.density, self.fed.numel())
            self.packed = self.fed.new_zeros(nbytes, dtype=torch.uint8)
        return Broadcast(self.packed, root, of=self.first, positions=len(self.error))

    def score(self) -> Request:
        """The all-gather of what the choice of a leader depends on."""
        self.packed = selection.pack(self.fed, self.density)
        size = self.fed[self._unpacked()].double().square().sum()
        waited = self.first.state.get(_WAITED, size.new_zeros(1)).to(size)
        return AllGather(torch.cat([size.view(1), waited]), of=self.first)

    def led_by_best(self, scores: torch.Tensor, leader: str) -> Request:
        """The all-reduce of the positions of the rank with the largest score."""
        sizes, waited = scores.view(-1, 2).unbind(1)
        score = sizes * (1 + waited) if leader == "auto" else sizes
        # Sorted, since argmax promises no order of equal scores: the lowest rank leads.
        self.leader = score.sort(descending=True, stable=True).indices[0]
        self.first.metrics["leader"] = self.leader
        self.first.metrics["skew"] = sizes.max() / sizes.mean()
        self.packed *= self.leader == self.first.rank
        return AllReduce(self.packed, "sum", of=self.first, positions=len(self.error))

    def values(self, codec: Cast | None) -> Request:
        """The all-reduce of the values at the leader's positions; all NaN if any value of the
        gradient cannot be sent, so that those at other positions reach every rank."""
        self.at, fed, error, end = self._unpacked(), self.fed, None, torch.inf
        if codec is not None:  # it tells a gradient that it cannot hold from a residual
            fed, error, end = _joined([c.gradient for c in self.contexts]), self.error, FP16_END
            kept = [c.residual for c in self.contexts if c.residual is not None]
            if kept:
                torch.index_select(_joined(kept), 0, self.at, out=error)
        mine = torch.where((fed.abs() < end).all(), fed[self.at].float(), torch.nan)
        return AllReduce(mine, "avg", error, codec=codec, of=self.first)

    def finish(self, mean: torch.Tensor) -> list[torch.Tensor]:
        """The averages, fp32, of its parameters; updates state unless a value is not finite."""
        finite = mean.isfinite().all()
        lengths = [c.gradient.numel() for c in self.contexts]
        average = torch.zeros_like(self.fed).index_copy_(0, self.at, mean)
        left = self.fed.index_copy(0, self.at, self.error)
        for c, rest in zip(self.contexts, left.split(lengths), strict=True):
            if c.residual is not None:
                torch.where(finite, rest, c.residual, out=c.residual)
        if self.leader is not None and _WAITED in self.first.state:
            kept = self.first.state[_WAITED]
            waited = (kept + 1) * (self.leader != self.first.rank)
            torch.where(finite, waited, kept, out=kept)
        return list(average.split(lengths))

    def _unpacked(self) -> torch.Tensor:
        return selection.unpack(self.packed, self.density, self.fed.numel())


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
