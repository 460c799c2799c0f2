"""Deep gradient compression, whole (Lin et al. 2018; HIPRESS evaluates its codec, `DGC`, alone).

Per parameter, with the gradient g, velocity u, residual r (both zero at first), and N ranks:

    1. g = g * min(1, sqrt(N) * clip / norm of this rank's gradients)     local clipping
    2. u = momentum * u + g;  r = r + u                                   momentum correction
    3. send the largest values of r (codec DGC) to all ranks;  r = r - sent
    4. u = 0 where a value was sent                                       momentum factor masking
    5. average = sum of what all ranks sent / N

Local clipping stands for clipping the average, which no rank knows before it sends. The average of
N unlike gradients (orthogonal, of equal norms) has 1 / sqrt(N) of their norm, so there it does what
clip_grad_norm_(parameters, clip) does to the average. The more alike the ranks' gradients are, the
looser it is: the average of equal ones keeps their norm, so it has up to sqrt(N) * clip. (The paper
divides a rank's gradients by N at once and sends sums: its threshold is clip / sqrt(N).)

So what is sent late was accumulated with the momentum that it would have had. Over all ranks,
nothing is lost: sum of u + sum of r before = N * average + sum of r after. If fp16 cannot hold a
value of g, the average is not finite, and no state changes; if it cannot hold r, what it cannot
hold stays in r.

Under DDP's find_unused_parameters a rank whose gradient is all zeros sends zeros: its u and r stay
as they are, as an optimiser skips a parameter without a gradient.

Warm-up: the density falls from 1/4 to 1/16, 1/64, ... to `density` in stages of equal length during
the first `warmup` steps after attach (the paper: four epochs), since gradients change fastest then.
The first step of each stage compiles its kernels. `handle.stats()["parameters"]` and
`str(handle)` tell the bytes of the present stage, `wire_bytes` what was sent in all.

Payload bytes per rank and step: those of codec DGC at that density, about k (v + p / 8) + 2 n / B
for k = density * n, v bytes per value and p bits per position in a block of B values; they go to
N - 1 ranks, in one round.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gradwire.aggregators.compressed import Encoded
from gradwire.aggregators.error_feedback import (
    RESIDUAL,
    give_back,
    hold_residuals,
    rounded,
    unused,
)
from gradwire.aggregators.protocol import Averages, Context, StateSpec, Steps
from gradwire.codecs import DGC, checks
from gradwire.codecs.topk import STORED
from gradwire.collectives import AllReduce
from gradwire.lang import Codec

VELOCITY = "velocity"
_SHRINKS = 4  # from one stage of the warm-up to the next
_STEPS = 1 << 32  # steps of one handle; the bits above number a module's handles


@dataclass(frozen=True)
class DeepGradientCompression(Encoded):
    """Sparse all-gather with momentum correction, local clipping, factor masking and warm-up.

    It takes the place of the optimiser's momentum: use SGD(momentum=0) and give the momentum here.
    An optimiser that has momentum for these parameters nevertheless is refused with a ConfigError
    at its first step. Weight decay of SGD then no longer passes through momentum: what was d is
    d / (1 - momentum) now.

    Under Adam and AdamW use momentum=0: these average and normalise gradients by themselves, and
    the method is accumulation alone, that is error feedback, with clipping and warm-up. With
    momentum here, an Adam needs betas=(0.0, ...).

    Args:
        density: the share of values that each rank sends after the warm-up, above 0 and at most 1.
        momentum: m above, at least 0 and below 1.
        clip: the norm to which the average of unlike gradients is clipped, before momentum; takes
            the place of clip_grad_norm_. A rank clips its own gradients to sqrt(N) * clip before it
            accumulates them, so the average of N ranks' equal gradients may have sqrt(N) * clip.
            The norm is that of all parameters of this aggregator, so nothing is sent before
            backward ends. With a GradScaler, it is of scaled gradients. None: no clipping.
        warmup: steps after attach with larger densities; 0: none.
        values: how values are sent, "fp16" or "fp32".

    A single rank sends nothing; its average is the velocity, plus what a residual owes.
    """

    density: float = 0.001
    momentum: float = 0.9
    clip: float | None = None
    warmup: int = 0
    values: str = "fp16"

    algorithm = "all_gather"
    own_feedback = True
    serves_one_rank = True

    def __post_init__(self) -> None:
        checks.number(self, "density", above=0, most=1)
        checks.number(self, "momentum", least=0, below=1)
        if self.clip is not None:
            checks.number(self, "clip", above=0, below=math.inf)
        checks.integer(self, "warmup", 0, _STEPS - 1)
        checks.one_of(self, "values", STORED)

    @property
    def codec(self) -> Codec:  # type: ignore[override]
        return DGC(self.density, self.values)

    @property
    def scope(self) -> str:  # type: ignore[override]
        return "layer" if self.clip is None else "model"

    @property
    def replaces_momentum(self) -> bool:  # type: ignore[override]
        return self.momentum > 0

    def states(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        kept = [RESIDUAL, VELOCITY] if self.momentum else [RESIDUAL]
        return {name: StateSpec((math.prod(shape),)) for name in kept}

    def stages(self) -> list[float]:
        """The densities of the warm-up."""
        found, density = [], 1 / _SHRINKS
        while self.warmup and density > self.density:
            found.append(density)
            density /= _SHRINKS
        return found

    def at(self, step: int) -> DeepGradientCompression:
        """The aggregator as it is in a step: without warm-up, at that step's density."""
        density = [*self.stages(), self.density][self.variant(step, 1)]
        return dataclasses.replace(self, density=density, warmup=0)

    def variant(self, step: int, world_size: int) -> int:
        """The stage of the warm-up."""
        stages, step = len(self.stages()), step % _STEPS
        return step * stages // self.warmup if step < self.warmup else stages

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        idle = [unused(c) for c in contexts]
        held = hold_residuals(contexts, idle)
        factor = self._clipping(contexts)
        given = [c.gradient.float() for c in contexts]
        if factor is not None:
            given = [g * factor for g in given]
        # The kernels add what is owed to g, which they tell from it: fp16 must hold g.
        owed = [self._owed(c, is_idle) for c, is_idle in zip(contexts, idle, strict=True)]
        # `given` are overwritten; they are the gradients' own memory if these are fp32.
        averages, given = given, [g.clone() for g in given]
        if contexts[0].world_size > 1:
            yield [
                AllReduce(
                    values, "avg", residual, codec=self.at(c.step).codec,
                    algorithm=self.algorithm, of=c,
                )
                for c, values, residual in zip(contexts, averages, owed, strict=True)
            ]  # fmt: skip
        else:
            for average, residual in zip(averages, owed, strict=True):
                average += residual
                residual.zero_()
        sent = []
        columns = zip(contexts, given, owed, idle, strict=True)
        for i, (c, g, residual, is_idle) in enumerate(columns):
            finite, whole = averages[i].isfinite().all(), self._owed(c, is_idle).add_(g)
            part = whole - residual
            averages[i] = rounded(averages[i], residual, c.gradient.dtype)
            rest = c.observed and c.gradient.dtype != torch.float32  # whether rounding left any
            sent.append(whole - residual if rest else part)
            torch.where(finite, residual, c.state[RESIDUAL], out=c.state[RESIDUAL])
            if self.momentum:
                u = g.add_(c.state[VELOCITY], alpha=self.momentum)
                if c.world_size > 1:
                    u *= part == 0
                if is_idle is not None:
                    finite = finite & ~is_idle
                torch.where(finite, u, c.state[VELOCITY], out=c.state[VELOCITY])
        give_back(contexts, held)
        return Averages(averages, sent)

    def _owed(self, c: Context, is_idle: torch.Tensor | None) -> torch.Tensor:
        """The residual, and the velocity's share in this step, unless the rank sends zeros."""
        residual = c.state[RESIDUAL]
        if not self.momentum:
            return residual.clone()
        owed = torch.add(residual, c.state[VELOCITY], alpha=self.momentum)
        return owed if is_idle is None else torch.where(is_idle, residual, owed)

    def _clipping(self, contexts: Sequence[Context]) -> torch.Tensor | None:
        """The factor by which this rank clips its gradients; None: it does not."""
        if self.clip is None:
            return None
        ordered = sorted(contexts, key=lambda c: c.name)
        norms = [torch.linalg.vector_norm(c.gradient, dtype=torch.float64) for c in ordered]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        most = self.clip * math.sqrt(contexts[0].world_size)
        factor = (most / norm).clamp(max=1.0)
        # Not 0, which would let the rank's finite gradients pass as zeros: no state may change.
        return torch.where(norm.isfinite(), factor, torch.nan).float()

    def recorded(self) -> str:
        clip = "" if self.clip is None else f", clip={self.clip:g}"
        warmup = f", warmup={self.warmup}" if self.warmup else ""
        return (
            f"dgc(density={self.density:g}, momentum={self.momentum:g}{clip}{warmup}, "
            f"values={self.values})"
        )
