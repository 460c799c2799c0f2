"""Error feedback: the compression error is added to the next step's gradient (THESIS Alg. 2.1).

    p = g + e; send p through the inner aggregator; e = p - sent

If the inner aggregator is one compressed all-reduce, the kernels update residuals in the same pass,
and the rank that owns a chunk keeps the error of the encoded sum in its own residual. So over all
ranks

    sum of gradients + sum of residuals before == world_size * average + sum of residuals after

up to the last rounding. A non-finite value never enters a residual. If the kernels do not update
residuals, a parameter with a non-finite average keeps its previous residual, since GradScaler
skips such a step. So it does with fp16 gradients, which GradScaler scales, if the kernels do.

Unused parameters. DDP hands out zeros for a parameter that a rank did not use, and discards the
average if no rank did (find_unused_parameters=True). No rank knows in time what the others used. So
a rank whose gradient is all zeros sends zeros: its residual is held until it uses the parameter.

A gradient in fp32 that travels in fp16, which cannot hold it, is non-finite in this sense: see
`gradwire.lang.forms`.

Gradients in fp16 are averaged in fp32. So are those in bf16 by aggregators that compute in fp32 and
return fp32. What is lost where such an average is rounded to the gradient's dtype is the same on
all ranks, and each adds it to its residual. (A codec's kernels decode to bf16 themselves. That is
the last rounding, which no residual keeps.) With residuals an average may exceed what fp16 can
hold: then it saturates, and the residual keeps the rest. If it became Inf instead, GradScaler would
skip the step and halve its scale, but not the residual that caused it, and so on for ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gradwire.aggregators.contract import find_fault, start_coroutine
from gradwire.aggregators.protocol import Aggregator, Averages, Context, StateSpec, Steps
from gradwire.errors import ConfigError
from gradwire.lang import Codec

RESIDUAL = "residual"
_FIRST = 1024  # values that mostly tell a gradient from zeros


@dataclass(frozen=True)
class ErrorFeedback(Aggregator):
    """Wraps any aggregator. Its state is an fp32 residual per parameter, plus the inner state."""

    inner: Aggregator

    def __post_init__(self) -> None:
        given: object = self.inner
        if not isinstance(given, Aggregator):
            codec = given if isinstance(given, str | Codec) else "qsgd"
            raise ConfigError(
                f"ErrorFeedback takes an aggregator, not {given!r:.60}: write "
                f'gw.attach(model, "{codec}", error_feedback=True)'
            )
        if isinstance(given, ErrorFeedback) or given.own_feedback:
            raise ConfigError(f"ErrorFeedback: {given} has its own: give it to attach as it is")

    @property
    def scope(self) -> str:  # type: ignore[override]
        return self.inner.scope

    @property
    def encoders(self) -> tuple[Codec, ...]:
        return self.inner.encoders

    def variant(self, step: int, world_size: int) -> int:
        return self.inner.variant(step, world_size)

    def states(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        inner = self.inner.states(shape)
        assert RESIDUAL not in inner, f"{self.inner}: {RESIDUAL!r} is error feedback's own state"
        return {RESIDUAL: StateSpec((math.prod(shape),)), **inner}

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        held = hold_residuals(contexts, [unused(c) for c in contexts])
        how = self._by_kernels if self.inner.feeds_back else self._by_itself
        ended = yield from how(contexts)
        give_back(contexts, held)
        return ended

    def _by_itself(self, contexts: Sequence[Context]) -> Steps:
        wanted = [c.gradient.float() + c.state[RESIDUAL] for c in contexts]
        inside = [replace(c, gradient=p.clone()) for c, p in zip(contexts, wanted, strict=True)]
        ended = yield from start_coroutine(self.inner, inside)
        if find_fault(ended, contexts) is not None:
            return ended  # the outer coroutine raises the error
        if not isinstance(ended, Averages):
            ended = Averages(ended, ended)
        averages, sent = list(ended.averages), list(ended.sent)
        for i, (c, p) in enumerate(zip(contexts, wanted, strict=True)):
            error, residual = p - sent[i].reshape(-1), c.state[RESIDUAL]
            # A step with a non-finite average is skipped, so the residual stays.
            finite = averages[i].isfinite().all()
            averages[i] = rounded(averages[i].reshape(-1), error, c.gradient.dtype)
            if c.gradient.dtype != torch.float32:
                sent[i] = p - error
            torch.where(finite & error.isfinite(), error, residual, out=residual)
        return Averages(averages, sent)

    def _by_kernels(self, contexts: Sequence[Context]) -> Steps:
        wanted, inside = {}, []
        before: dict[str, torch.Tensor] = {}  # residuals of fp16 gradients
        for c in contexts:
            c.residual = c.state[RESIDUAL]
            if c.observed:
                given = c.gradient if c.reduction is None else c.reduction.contribution()
                wanted[c.name] = given.float() + c.residual
            of_shards = c.reduction and (c.reduction.lengths or c.reduction.residual is not None)
            if c.gradient.dtype == torch.float16 and not of_shards:
                before[c.name] = c.residual.clone()
                c = replace(c, gradient=c.gradient.float())
            inside.append(c)
        ended = yield from start_coroutine(self.inner, inside)
        if find_fault(ended, inside) is not None:
            return ended
        averages = list(ended.averages if isinstance(ended, Averages) else ended)
        for i, c in enumerate(contexts):
            average, residual = averages[i].reshape(-1), c.state[RESIDUAL]
            averages[i] = rounded(average, residual, c.gradient.dtype)
            if c.name in before:
                torch.where(average.isfinite().all(), residual, before[c.name], out=residual)
        if not wanted:
            return averages
        return Averages(averages, [wanted[c.name] - c.state[RESIDUAL] for c in contexts])

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        inside = self.inner.feeds_back and dtype != torch.float16
        return self.inner.payload_bytes(shape, dtype if inside else torch.float32)

    def recorded(self) -> str:
        return f"{self.inner.recorded()}, error feedback"

    def __str__(self) -> str:
        return f"{self.inner}, error feedback"


def unused(c: Context) -> torch.Tensor | None:
    """Whether the gradient may be of an unused parameter, a tensor of one bool on its device; None:
    it is not."""
    g = c.gradient
    if not c.may_be_unused or not g.numel():
        return None
    if g.is_cuda:  # no wait for the device
        return ~g.any()
    if g[:_FIRST].any() or g.any():
        return None
    return torch.ones((), dtype=torch.bool)


def hold_residuals(
    contexts: Sequence[Context], idle: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Take the residuals of parameters that are unused (`idle`: see `unused`) out of the states,
    for `give_back`."""
    held: list[torch.Tensor | None] = []
    for c, is_idle in zip(contexts, idle, strict=True):
        residual = c.state[RESIDUAL]
        held.append(None if is_idle is None else torch.where(is_idle, residual, 0.0))
        if is_idle is not None:
            residual.masked_fill_(is_idle, 0.0)
    return held


def give_back(contexts: Sequence[Context], held: Sequence[torch.Tensor | None]) -> None:
    """Add what was held to the residuals."""
    for c, part in zip(contexts, held, strict=True):
        if part is not None:
            c.state[RESIDUAL] += part


def rounded(
    average: torch.Tensor, residual: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """An average in the gradient's dtype, if that is narrower: finite values saturate. What that
    loses is added to the residual of every rank, unless a value is not finite: GradScaler skips
    that step."""
    if dtype.itemsize >= average.dtype.itemsize:
        return average
    most, finite = torch.finfo(dtype).max, average.isfinite()
    found = torch.where(finite, average.clamp(-most, most), average).to(dtype)
    if residual is not None:
        residual += torch.where(finite.all(), average - found.to(average.dtype), 0.0)
    return found
