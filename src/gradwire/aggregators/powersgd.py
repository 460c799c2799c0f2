"""PowerSGD (THESIS 2.2.3, UTIL 3.3): a gradient matrix as the product of two thin matrices.

For a parameter of n x m values (all dimensions after the first flattened into m) and rank r:

    P = M Q;     all-reduce P;  orthogonalise P's columns
    Q = M^T P;   all-reduce Q;  average = P Q^T

The next step starts from Q (warm start, one power iteration per step). Two rounds per scope,
whatever the number of layers; matrices of the same shape are orthogonalised in one batch.
Payload bytes per rank and step: 4 r (n + m). A parameter that would not shrink (r (n + m) >= n m),
and every vector, is averaged uncompressed in the first round.

A rank's contribution is P Q^T with its own Q, from before the second all-reduce: the residual is
the part of its own matrix outside the span of P's columns. (The average in its place would give the
same sum over ranks, but residuals that grow as long as ranks see different data.)

All ranks must compute bit-identical orthonormal columns and P Q^T. A matrix library does not
guarantee that: its last bits depend on its number of threads, on a matrix's address, and on the
batch. So these two, and the contribution, are sums in a fixed order (on a GPU, which must be the
same model on all ranks, the columns are torch's). The products M Q and M^T P are local to a rank
and use the library, layer by layer on equally aligned memory, so that bucketing changes no bit of
them (law 8) as long as the number of threads stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.aggregators.protocol import Aggregator, Averages, Context, StateSpec, Steps
from gradwire.collectives import AllReduce
from gradwire.errors import ConfigError

_BASIS = "basis"  # Q
_ALIGNED = 16  # alignment of torch's allocator, in fp32 values
_DEPENDENT = 1e-9  # relative norm of a column's remainder below which it is linearly dependent


@dataclass(frozen=True)
class PowerSGD(Aggregator):
    """Low-rank averages with a warm start; `ErrorFeedback` keeps the rest.

    Args:
        rank: columns of P and Q, 1 or more.
    """

    rank: int = 2

    needs_feedback = True

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ConfigError(f"rank={self.rank!r}: give a whole number of at least 1")

    def states(self, shape: tuple[int, ...]) -> Mapping[str, StateSpec]:
        if not self.shrinks(shape):
            return {}
        columns = math.prod(shape[1:])
        return {_BASIS: StateSpec((columns, self.rank), kind="replicated", start="normal")}

    def shrinks(self, shape: tuple[int, ...]) -> bool:
        """Whether P and Q together hold fewer values than a gradient of `shape`."""
        columns = math.prod(shape[1:])
        return len(shape) > 1 and self.rank * (shape[0] + columns) < shape[0] * columns

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        low = [c for c in contexts if self.shrinks(c.shape)]
        rest = [c for c in contexts if not self.shrinks(c.shape)]
        matrices = [_aligned(c.gradient.float().view(c.shape[0], -1)) for c in low]
        whole = [c.gradient.clone() for c in rest]

        p = [m @ _aligned(c.state[_BASIS]) for c, m in zip(low, matrices, strict=True)]
        yield [*_all_reduces(low, p), *(AllReduce(c.gradient, of=c) for c in rest)]
        p = orthogonal(p)
        mine = [m.mT @ columns for m, columns in zip(matrices, p, strict=True)]
        q = [basis.clone() for basis in mine]
        if low:
            yield _all_reduces(low, q)
        averages = {id(c): c.gradient for c in rest}
        sent = {id(c): values for c, values in zip(rest, whole, strict=True)}
        for c, columns, own, basis in zip(low, p, mine, q, strict=True):
            averages[id(c)] = product(columns, basis).view(-1)
            sent[id(c)] = product(columns, own).view(-1)
            kept = c.state[_BASIS]
            torch.where(basis.isfinite().all(), basis, kept, out=kept)
        return Averages([averages[id(c)] for c in contexts], [sent[id(c)] for c in contexts])

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        if not self.shrinks(shape):
            return math.prod(shape) * dtype.itemsize
        return 4 * self.rank * (shape[0] + math.prod(shape[1:]))

    def __str__(self) -> str:
        return f"powersgd(rank={self.rank})"


def orthogonal(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Orthonormal columns that span the columns of each matrix [n, r], for n >= r; matrices of the
    same shape are decomposed in one batch.

    Equal inputs give equal bits on all ranks, whatever the batch. The columns of a non-finite
    matrix are all NaN.
    """
    by_shape: dict[torch.Size, list[int]] = {}
    for at, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(at)
    found = list(matrices)
    for places in by_shape.values():
        stack = torch.stack([matrices[at] for at in places])
        finite = stack.isfinite().flatten(1).all(1)[:, None, None]
        stack = torch.where(finite, stack, 0.0)
        q = torch.linalg.qr(stack).Q if stack.is_cuda else _gram_schmidt(stack)
        for at, columns in zip(places, torch.where(finite, q, torch.nan), strict=True):
            found[at] = columns.clone(memory_format=torch.contiguous_format)
    return found


def _gram_schmidt(stack: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns of matrices [layers, n, r], fp32, by Gram-Schmidt in fp64 with
    reorthogonalisation. A linearly dependent column is replaced by an axis outside the span of the
    columns before it."""
    rows = np.ascontiguousarray(stack.numpy().transpose(0, 2, 1), dtype=np.float64)
    layers = np.arange(len(rows))
    for k in range(rows.shape[1]):
        before, row = rows[:, :k], rows[:, k]
        size = _lengths(row)
        _project(row, before)
        axis = (before * before).sum(1).argmin(-1)
        dependent = _lengths(row) <= _DEPENDENT * size
        row[dependent] = 0.0
        row[layers[dependent], axis[dependent]] = 1.0
        _project(row, before)
        row /= _lengths(row)[:, None]
    return torch.from_numpy(rows.transpose(0, 2, 1)).to(stack.dtype)


def _project(row: np.ndarray, before: np.ndarray) -> None:
    """Subtract from each layer's row its projection on the rows before it."""
    shares = (before * row[:, None]).sum(-1)
    row -= (shares[..., None] * before).sum(1)


def _lengths(row: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.sqrt((row * row).sum(-1))
    return found


def product(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """P Q^T of [n, r] and [m, r]; equal inputs give equal bits."""
    found = p[:, :1] * q[:, 0]
    for k in range(1, p.shape[1]):
        found += p[:, k : k + 1] * q[:, k]
    return found


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, cloned if its memory is not aligned like a new allocation."""
    return matrix if matrix.data_ptr() % (4 * _ALIGNED) == 0 else matrix.clone()


def _all_reduces(contexts: Sequence[Context], matrices: Sequence[torch.Tensor]) -> list[AllReduce]:
    """An in-place all-reduce of each layer's matrix."""
    return [AllReduce(m.view(-1), of=c) for c, m in zip(contexts, matrices, strict=True)]
