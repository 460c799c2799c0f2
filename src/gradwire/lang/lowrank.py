"""The arithmetic of PowerSGD: products of matrices with thin factors, orthonormal columns.

Every step is one call for all matrices of a scope. Two classes do the same work: `Compiled`, for
the CPU (emit/lowrank.c), and `Eager`, with torch and numpy, for any device. What ranks must compute
alike (columns and averages) has the same bits in both on the CPU. It is a sum in a fixed order: the
last bits of a matrix library's sums depend on its number of threads, on a matrix's address, and on
the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from gradwire.lang.call import check_memory
from gradwire.lang.emit import c
from gradwire.lang.kernels import announce
from gradwire.lang.native import jit, prebuilt

_CPU = torch.device("cpu")
_LARGEST = 3.0e38  # a bound of an average's values above this counts as not finite
_DEPENDENT = 1e-9  # relative norm of a column's remainder below which it is linearly dependent
_CHEAP = 1e-8  # relative square of a remainder from which the Cholesky factor is accurate enough
_LANES = 8  # a sum over a column adds every 8th value, and then the 8 sums in pairs
_TENSORS = ("values", "residual", "basis", "start", "left", "own", "right")  # of `Factored`
# emit/lowrank.c declares the same 80 bytes.
_ROW = np.dtype(
    [
        *((name, "<u8") for name in _TENSORS),
        ("n", "<i8"),
        ("m", "<i8"),
        ("r", "<i4"),
        ("kept", "<i4"),
    ]
)
assert _ROW.itemsize == 80


@dataclass(frozen=True)
class Factored:
    """A matrix of n x m values and its factors of r columns, all fp32 and contiguous.

    Attributes:
        values: [n, m]: the gradient; after `left` with the residual; after `finish` the average.
        residual: [n, m], or None: the error that this rank keeps.
        basis: [m, r]: Q of the last step.
        start: [r, m]: Q transposed, each column times a power of two, so that M Q stays in range
            whatever the scale of the gradient.
        left: [r, n]: P transposed.
        own, right: [r, m]: this rank's M^T P, and its average over ranks, transposed.
    """

    values: torch.Tensor
    residual: torch.Tensor | None
    basis: torch.Tensor
    start: torch.Tensor
    left: torch.Tensor
    own: torch.Tensor
    right: torch.Tensor


def lowrank(matrices: Sequence[Factored]) -> Eager:
    """The steps for these matrices. Without a compiler they are eager, with one warning."""
    if matrices[0].values.is_cuda:
        return Eager(matrices)
    reason = _missing()
    if reason is None:
        return Compiled(matrices)
    announce(reason)
    return Eager(matrices)


class Eager:
    """The steps, for all matrices of a scope, in torch and numpy."""

    def __init__(self, matrices: Sequence[Factored]) -> None:
        self._matrices = matrices

    def left(self) -> None:
        """values += residual; left = (values x start^T)^T."""
        for a in self._matrices:
            if a.residual is not None:
                a.values.add_(a.residual)
            most = a.basis.abs().amax(0)
            usual = most.isfinite() & (most > 0)
            _, exponent = torch.frexp(torch.where(usual, most, 1.0))
            half = (1 - exponent) // 2
            once, again = (
                torch.ldexp(torch.ones_like(most), e) for e in (half, 1 - exponent - half)
            )
            a.start.copy_((a.basis * once * again).mT)
            torch.matmul(a.start, a.values.mT, out=a.left)

    def columns(self, cheap: bool) -> None:
        """Orthonormal rows of `left` that span the rows before; all NaN if one is not finite.

        Args:
            cheap: by the Cholesky factor of the Gram matrix, unless rows are nearly dependent;
                else by Gram-Schmidt, twice.
        """
        by_shape: dict[torch.Size, list[torch.Tensor]] = {}
        for a in self._matrices:
            by_shape.setdefault(a.left.shape, []).append(a.left)
        for group in by_shape.values():
            stack = torch.stack(group)
            finite = stack.isfinite().flatten(1).all(1)[:, None, None]
            stack = torch.where(finite, stack, 0.0)
            rows = _of_device(stack, cheap) if stack.is_cuda else _of_numpy(stack, cheap)
            for left, found in zip(group, torch.where(finite, rows, torch.nan), strict=True):
                left.copy_(found)

    def right(self) -> None:
        """own = right = left x values."""
        for a in self._matrices:
            torch.matmul(a.left, a.values, out=a.own)
            a.right.copy_(a.own)

    def finish(self) -> list[bool]:
        """values = left^T x right, residual = values before - left^T x own, basis = right^T.

        Returns whether each matrix's average is finite; where not, residual and basis stay.
        """
        kept = []
        for a in self._matrices:
            bound = a.right.abs().amax() * (len(a.left) + 1)
            kept.append(bool(bound <= _LARGEST))  # False for NaN
            if not kept[-1]:
                a.values.fill_(torch.nan)
                continue
            a.basis.copy_(a.right.mT)
            if a.residual is not None:
                torch.sub(a.values, product(a.left, a.own), out=a.residual)
            a.values.copy_(product(a.left, a.right))
        return kept


class Compiled(Eager):
    """The steps as compiled code, on torch's number of threads.

    Raises:
        ConfigError: a matrix or a factor is not what `Factored` says.
    """

    def __init__(self, matrices: Sequence[Factored]) -> None:
        super().__init__(matrices)  # keeps their memory
        self._threads = torch.get_num_threads()
        rows = [(*_addresses(a), *a.values.shape, len(a.left), 0) for a in matrices]
        self._rows = np.array(rows, _ROW)
        self._of = self._rows.ctypes.data, len(matrices), self._threads

    def left(self) -> None:
        _functions()["lowrank_left"](*self._of)

    def columns(self, cheap: bool) -> None:
        r, n = self._rows["r"].astype(np.int64), self._rows["n"]
        each = int((r * (n + 2 * _LANES) + r * r).max())
        scratch = torch.empty(each * self._threads, dtype=torch.float64)
        _functions()["lowrank_columns"](*self._of, cheap, scratch.data_ptr(), each)

    def right(self) -> None:
        _functions()["lowrank_right"](*self._of)

    def finish(self) -> list[bool]:
        _functions()["lowrank_finish"](*self._of)
        return [bool(kept) for kept in self._rows["kept"]]


def _addresses(a: Factored) -> Iterator[int]:
    """Of the tensors, as compiled code gets them: 0 for no residual."""
    (n, m), r = a.values.shape, len(a.left)
    numels = n * m, n * m, m * r, m * r, n * r, m * r, m * r
    for name, numel in zip(_TENSORS, numels, strict=True):
        tensor = getattr(a, name)
        if tensor is not None or name != "residual":
            check_memory(f"a matrix of {n} x {m}", name, tensor, numel, torch.float32, _CPU)
        yield 0 if tensor is None else tensor.data_ptr()


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left^T right of [r, n] and [r, m], summed over r in order."""
    found = left[0][:, None] * right[0]
    for p, q in zip(left[1:], right[1:], strict=True):
        found += p[:, None] * q
    return found


def _of_device(stack: torch.Tensor, cheap: bool) -> torch.Tensor:
    """Orthonormal rows of matrices [layers, r, n] by torch."""
    if cheap:
        wide = stack.double()
        factor, info = torch.linalg.cholesky_ex(wide @ wide.mT)
        diagonal, squares = factor.diagonal(dim1=-2, dim2=-1), wide.square().sum(-1)
        if bool(((info == 0) & (diagonal.square() > _CHEAP * squares).all(-1)).all()):
            solved: torch.Tensor = torch.linalg.solve_triangular(factor, wide, upper=False)
            return solved.to(stack.dtype)
    columns: torch.Tensor = torch.linalg.qr(stack.mT).Q
    return columns.mT


def _of_numpy(stack: torch.Tensor, cheap: bool) -> torch.Tensor:
    """Orthonormal rows of matrices [layers, r, n], in fp64."""
    layers, r, n = stack.shape
    rows = np.zeros((layers, r, -(-n // _LANES) * _LANES))
    rows[:, :, :n] = stack.numpy()
    for at in range(layers):
        if not (cheap and _cholesky(rows[at])):
            _gram_schmidt(rows[at], n)
    return torch.from_numpy(rows[:, :, :n]).to(stack.dtype)


def _dots(row: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The products of a row with rows [k, n]."""
    sums = np.zeros((len(rows), _LANES))
    lanes = (rows * row).reshape(len(rows), -1, _LANES)
    for part in range(lanes.shape[1]):
        sums += lanes[:, part]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


def _project(row: np.ndarray, before: np.ndarray) -> None:
    """Subtract from a row its projection on the rows before it."""
    if len(before):
        shares = _dots(row, before)
        found = shares[0] * before[0]
        for share, other in zip(shares[1:], before[1:], strict=True):
            found += share * other
        row -= found


def _length(row: np.ndarray) -> Any:
    return np.sqrt(_dots(row, row[None])[0])


def _gram_schmidt(rows: np.ndarray, n: int) -> None:
    """Gram-Schmidt with reorthogonalisation, in place. A linearly dependent row is replaced by an
    axis outside the span of the rows before it."""
    for k, row in enumerate(rows):
        before, size = rows[:k], _length(row)
        _project(row, before)
        if _length(row) <= _DEPENDENT * size:
            inside = np.zeros(n)
            for other in before:
                inside += other[:n] * other[:n]
            row[:] = 0.0
            row[inside.argmin()] = 1.0
        _project(row, before)
        row /= _length(row)


def _cholesky(rows: np.ndarray) -> bool:
    """The rows times the inverse of their Gram matrix's Cholesky factor, in place; False, and no
    change, if a row is nearly dependent on those before it."""
    gram = np.zeros((len(rows), len(rows)))  # its diagonal becomes that of the inverse
    for k, row in enumerate(rows):
        gram[k, : k + 1] = _dots(row, rows[: k + 1])
    for k, square in enumerate(gram.diagonal().copy()):
        for column in range(k + 1):
            total = gram[k, column]
            for other in range(column):
                total -= gram[k, other] * gram[column, other]
            if column < k:
                gram[k, column] = total * gram[column, column]
            elif not total > _CHEAP * square:
                return False
            else:
                gram[k, k] = 1 / np.sqrt(total)
    for k, row in enumerate(rows):
        for before in range(k):
            row -= gram[k, before] * rows[before]
        row *= gram[k, k]
    return True


@cache
def _functions() -> dict[str, Any]:
    """The functions of emit/lowrank.c. Raises `jit.CompileError`."""
    return prebuilt.functions(c.lowrank(), c.LOWRANK)


@cache
def _missing() -> str | None:
    """Why there is no compiled code; None if there is."""
    try:
        _functions()
    except jit.CompileError as error:
        return str(error)
    return None
