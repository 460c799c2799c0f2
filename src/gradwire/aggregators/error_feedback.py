"""Error feedback: the compression error is added to the next step's gradient (THESIS Alg. 2.1).

    p = g + e; send p through the inner aggregator; e = p - sent

If the inner aggregator is one compressed all-reduce, the kernels update residuals in the same pass,
and the rank that owns a chunk keeps the error of the encoded sum in its own residual. So over all
ranks

    sum of gradients + sum of residuals before == world_size * average + sum of residuals after

up to the last rounding. A non-finite value never enters a residual. If the kernels do not update
residuals, a parameter with a non-finite average keeps its previous residual, since GradScaler
skips such a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gradwire.aggregators.contract import find_fault, start_coroutine
from gradwire.aggregators.protocol import Aggregator, Averages, Context, StateSpec, Steps

RESIDUAL = "residual"


@dataclass(frozen=True)
class ErrorFeedback(Aggregator):
    """Wraps any aggregator. Its state is an fp32 residual per parameter, plus the inner state."""

    inner: Aggregator

    def __post_init__(self) -> None:
        has = isinstance(self.inner, ErrorFeedback) or self.inner.own_feedback
        assert not has, "the inner aggregator has error feedback"

    @property
    def scope(self) -> str:  # type: ignore[override]
        return self.inner.scope

    def steps_to_rehearse(self, world_size: int) -> Sequence[int]:
        return self.inner.steps_to_rehearse(world_size)

    def states(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        inner = self.inner.states(shape)
        assert RESIDUAL not in inner, f"{self.inner}: {RESIDUAL!r} is error feedback's own state"
        return {RESIDUAL: StateSpec((math.prod(shape),)), **inner}

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        if self.inner.feeds_back:
            return (yield from self._by_kernels(contexts))
        wanted = [c.gradient.float() + c.state[RESIDUAL] for c in contexts]
        inside = [replace(c, gradient=p.clone()) for c, p in zip(contexts, wanted, strict=True)]
        ended = yield from start_coroutine(self.inner, inside)
        if find_fault(ended, contexts) is not None:
            return ended  # the outer coroutine raises the error
        if not isinstance(ended, Averages):
            ended = Averages(ended, ended)
        for c, p, average, part in zip(contexts, wanted, ended.averages, ended.sent, strict=True):
            error, residual = p - part.reshape(-1), c.state[RESIDUAL]
            # A step with a non-finite average is skipped, so the residual stays.
            keep = average.isfinite().all() & error.isfinite()
            torch.where(keep, error, residual, out=residual)
        return ended

    def _by_kernels(self, contexts: Sequence[Context]) -> Steps:
        wanted = {}
        for c in contexts:
            c.residual = c.state[RESIDUAL]
            if c.observed:
                wanted[c.name] = c.gradient.float() + c.residual
        averages = yield from start_coroutine(self.inner, contexts)
        if (
            not wanted
            or find_fault(averages, contexts) is not None
            or isinstance(averages, Averages)
        ):
            return averages
        return Averages(averages, [wanted[c.name] - c.state[RESIDUAL] for c in contexts])

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return self.inner.payload_bytes(shape, dtype if self.inner.feeds_back else torch.float32)

    def __str__(self) -> str:
        return f"{self.inner}, error feedback"
