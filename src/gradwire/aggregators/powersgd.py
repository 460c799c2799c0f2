"""PowerSGD (THESIS 2.2.3, UTIL 3.3): a gradient matrix as the product of two thin matrices.

For a parameter of n x m values (all dimensions after the first flattened into m, as in torch's
hook) and rank r:

    P = M Q;     all-reduce P;  orthogonalise P's columns
    Q = M^T P;   all-reduce Q;  average = P Q^T

Two rounds per scope, whatever the number of layers. With a warm start the next step begins with Q
(one power iteration per step); with a fresh start every step draws a new Q, equal on all ranks.

Bytes. Payload per rank and step: 4 r (n + m). A parameter that would not shrink (r (n + m) >= n m,
so also every matrix with a side of r or less), and every vector, is averaged in fp32 in the first
round: 4 n m bytes.

Memory. State: the residual, 4 n m bytes, and with a warm start Q, 4 m r. While a scope is in
flight: 4 r (n + 2 m), and 4 n m for fp16 and bf16, whose arithmetic is fp32. Orthogonalisation
takes 8 r (n + 16 + r) for the largest matrix, once per thread.

Error feedback. A rank's contribution is P Q^T with its own Q, from before the second all-reduce:
the residual is the part of its own matrix outside the span of P's columns. (The average in its
place would give the same sum over ranks, but residuals that grow as long as ranks see different
data.) The residual is added, and replaced, in the passes over memory that the products need: per
fp32 value 12 bytes in M Q, 4 in M^T P and 12 at the end. Averages are fp32; `ErrorFeedback` keeps
what rounding to fp16 or bf16 loses of them, also of those sent whole.

Large scales. GradScaler multiplies gradients by 2^16 and more, and P of a warm start has the square
of their size. So Q's columns are scaled by powers of two before the product, which changes neither
their span nor a bit of their mantissas. An average that fp16 cannot hold saturates: see
gradwire.aggregators.error_feedback.

Equal bits. All ranks must compute bit-identical orthonormal columns and averages: see
gradwire.lang.lowrank. (On a GPU, which must be the same model on all ranks, the columns are
torch's.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gradwire.aggregators.protocol import Aggregator, Averages, Context, StateSpec, Steps
from gradwire.codecs import checks
from gradwire.collectives import AllReduce
from gradwire.lang.lowrank import Factored, lowrank, product

_BASIS = "basis"  # Q
_ORTHOGONAL = ("cholesky", "qr")


@dataclass(frozen=True)
class PowerSGD(Aggregator):
    """Low-rank averages; the residual keeps the rest.

    Args:
        rank: columns of P and Q, 1 or more. A matrix that would not shrink is averaged dense. It is
            an error if that is true of every matrix, or of one to which `codecs` gives a rank.
        warm: whether a step starts with the last step's Q; else with random numbers. A fresh start
            needs no Q in memory, and approximates less well.
        orthogonal: how P's columns become orthonormal, in fp64: "cholesky" divides by the Cholesky
            factor of P^T P; "qr" is Gram-Schmidt with reorthogonalisation, twice the arithmetic.
            Columns that are nearly dependent take Gram-Schmidt in either case.

    Raises:
        ConfigError: an option has no legal value.
    """

    rank: int = 8
    warm: bool = True
    orthogonal: str = "cholesky"

    feeds_back = True
    needs_feedback = True

    def __post_init__(self) -> None:
        checks.integer(self, "rank", 1)
        checks.one_of(self, "warm", (False, True))
        checks.one_of(self, "orthogonal", _ORTHOGONAL)

    def states(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        if not self.warm or not self.shrinks(shape):
            return {}
        columns = math.prod(shape[1:])
        return {_BASIS: StateSpec((columns, self.rank), kind="replicated", start="normal")}

    def shrinks(self, shape: tuple[int, ...]) -> bool:
        """Whether P and Q together hold fewer values than a gradient of `shape`."""
        columns = math.prod(shape[1:])
        return len(shape) > 1 and self.rank * (shape[0] + columns) < shape[0] * columns

    def impossible(self, shape: tuple[int, ...]) -> str | None:
        if len(shape) < 2 or self.shrinks(shape):
            return None
        n, m = shape[0], math.prod(shape[1:])
        most = (n * m - 1) // (n + m) if n * m else 0
        mend = f"the largest rank that does is {most}"
        if not most:
            mend = "no rank shrinks it: use None, which averages it as it is"
        return f"rank={self.rank} does not shrink a matrix of {n} x {m}: {mend}"

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        low = [c for c in contexts if self.shrinks(c.shape)]
        rest = [c for c in contexts if not self.shrinks(c.shape)]
        whole = _with_residuals(rest)
        matrices = self._factored(low)
        steps = lowrank(matrices) if low else None

        if steps:
            steps.left()
        yield [
            *(AllReduce(a.left.view(-1), of=c) for c, a in zip(low, matrices, strict=True)),
            *(AllReduce(values, of=c) for c, values in zip(rest, whole, strict=True)),
        ]
        averages = {id(c): values for c, values in zip(rest, whole, strict=True)}
        _clear_residuals(rest, whole)
        if steps:
            steps.columns(cheap=self.orthogonal == "cholesky")
            steps.right()
            yield [AllReduce(a.right.view(-1), of=c) for c, a in zip(low, matrices, strict=True)]
            steps.finish()
        for c, a in zip(low, matrices, strict=True):
            averages[id(c)] = a.values.view(-1)
        found = [averages[id(c)] for c in contexts]
        if not any(c.observed and c.residual is None for c in low):
            return found
        sent = {id(c): product(a.left, a.own).view(-1) for c, a in zip(low, matrices, strict=True)}
        return Averages(found, [sent.get(id(c), c.gradient) for c in contexts])

    def _factored(self, low: Sequence[Context]) -> list[Factored]:
        sides = [(c.shape[0], math.prod(c.shape[1:])) for c in low]
        device = low[0].gradient.device if low else None
        r, rows, columns = self.rank, [n for n, _ in sides], [m for _, m in sides]
        left, own, right = (
            torch.empty(r * sum(of), dtype=torch.float32, device=device).split([r * k for k in of])
            for of in (rows, columns, columns)
        )
        made = []
        for at, (c, (n, m)) in enumerate(zip(low, sides, strict=True)):
            mine = own[at].view(r, m)  # takes M^T P once the scaled basis is not needed
            values = c.gradient.float().view(n, m)
            residual = None if c.residual is None else c.residual.view(n, m)
            made.append(
                Factored(
                    values, residual, self._basis(c, m), mine, left[at].view(r, n), mine,
                    right[at].view(r, m),
                )
            )  # fmt: skip
        return made

    def _basis(self, context: Context, columns: int) -> torch.Tensor:
        if self.warm:
            return context.state[_BASIS].contiguous()
        shape, generator = (columns, self.rank), context.generator()
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32)
        return drawn.to(context.gradient.device)

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        if not self.shrinks(shape):
            return 4 * math.prod(shape)
        return 4 * self.rank * (shape[0] + math.prod(shape[1:]))

    def recorded(self) -> str:
        fresh = "" if self.warm else ", fresh start"
        how = "" if self.orthogonal == "cholesky" else f", {self.orthogonal}"
        return f"powersgd(rank={self.rank}{fresh}{how})"


def _with_residuals(contexts: Sequence[Context]) -> list[torch.Tensor]:
    """The gradients in fp32, with the residuals."""
    values = [c.gradient.float() for c in contexts]
    kept = [
        (v, c.residual) for c, v in zip(contexts, values, strict=True) if c.residual is not None
    ]
    if kept:
        torch._foreach_add_([v for v, _ in kept], [residual for _, residual in kept])
    return values


def _clear_residuals(contexts: Sequence[Context], averages: Sequence[torch.Tensor]) -> None:
    """Nothing is left of what was sent whole, unless the average is not finite: then the step is
    skipped."""
    kept = [
        (c.residual, average)
        for c, average in zip(contexts, averages, strict=True)
        if c.residual is not None
    ]
    if kept and not kept[0][0].is_cuda and torch.cat([a for _, a in kept]).isfinite().all():
        torch._foreach_zero_([residual for residual, _ in kept])
        return
    for residual, average in kept:  # without a wait for a GPU
        residual.mul_(~average.isfinite().all())
