"""The discrete cosine transform of tiles, with the same bits on every rank and machine.

The orthonormal DCT-II of n values is a product of sparse orthogonal matrices (Plonka, Tasche: Fast
and numerically stable algorithms for discrete cosine transforms, 2005):

    C2(n) = even and odd outputs of [C2(n/2), C4(n/2)]; sums and differences of mirrored values
    C4(n) = sums and differences of outputs of [C2(n/2), C2(n/2)]; rotations of mirrored values

Every row of each has at most two entries. So a factor is two products and one addition of fp32
tensors, each of them rounded: a matrix product would add in an order, and fuse multiplications, as
threads and machine have it. A tile of 64 x 64 takes 8 factors per dimension. The inverse has the
transposed ones, the last first.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch.nn.functional import pad

_AT_ONCE = 1 << 16  # values, which stay in a cache of the CPU

Factor = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # x[i] * a + x[j] * b


def coefficients(values: torch.Tensor, shape: tuple[int, ...], side: int) -> torch.Tensor:
    """The orthonormal DCT-II of tiles: (tiles, side * side).

    A tile is a square of a matrix whose dimensions `side` divides; of other shapes, it is as many
    values in a row, and zeros after the last.

    Args:
        values: of a parameter of `shape`, fp32, flat.
        side: a power of two.
    """
    if not _is_tiled(shape, side):
        return _transformed(pad(values, (0, -len(values) % side**2)).view(-1, side, side))
    tiles = values.view(-1, side, shape[1] // side, side).transpose(1, 2)
    return _transformed(tiles.reshape(-1, side, side))


def values_of(found: torch.Tensor, shape: tuple[int, ...], side: int) -> torch.Tensor:
    """The values of `shape`, flat, that have these coefficients."""
    tiles = _transformed(found.view(-1, side, side), inverse=True)
    if _is_tiled(shape, side):
        tiles = tiles.view(-1, shape[1] // side, side, side).transpose(1, 2)
    return tiles.reshape(-1)[: math.prod(shape)]


def _is_tiled(shape: tuple[int, ...], side: int) -> bool:
    return len(shape) == 2 and shape[0] % side == shape[1] % side == 0


def _transformed(tiles: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Of each tile, along both dimensions: (tiles, side * side)."""
    side, found = tiles.shape[1], []
    factors = _factors_on(side, inverse, tiles.device)
    for some in tiles.split(len(tiles) if tiles.is_cuda else max(1, _AT_ONCE // side**2)):
        x = some.permute(1, 2, 0)
        for _ in range(2):
            for i, a, j, b in factors:
                x = x.index_select(0, i).mul_(a).add_(x.index_select(0, j).mul_(b))
            x = x.transpose(0, 1)
        found.append(x.permute(2, 0, 1).reshape(-1, side**2))
    return torch.cat(found)


@lru_cache(maxsize=32)
def _factors_on(side: int, inverse: bool, device: torch.device) -> list[Factor]:
    """The factors, the first that is applied first."""
    found, matrices = [], _factors(side)
    for m in [m.T for m in reversed(matrices)] if inverse else matrices:
        # Of a row with one entry, the other is 0.
        at = m.abs().sort(dim=1, descending=True, stable=True).indices[:, :2]
        (i, j), (a, b) = at.T.contiguous().to(device), m.gather(1, at).T.float().to(device)
        found.append((i, a[:, None, None], j, b[:, None, None]))
    return found


def _factors(n: int, fourth: bool = False) -> list[torch.Tensor]:
    """Of the DCT-II of n values, or of their DCT-IV; float64."""
    if n == 1:
        return []
    half, one = n // 2, torch.eye(n, dtype=torch.float64)
    first = torch.zeros_like(one)
    for j in range(half):
        angle = (2 * j + 1) * math.pi / (4 * n) if fourth else math.pi / 4
        cosine, sine, sign = math.cos(angle), math.sin(angle), -1 if fourth and j % 2 else 1
        first[j] = cosine * one[j] + sine * one[n - 1 - j]
        first[half + j] = sign * (sine * one[j] - cosine * one[n - 1 - j])
    upper, lower = _factors(half), _factors(half, fourth=not fourth)
    while len(upper) != len(lower):
        min(upper, lower, key=len).append(torch.eye(half, dtype=torch.float64))
    *most, last = [first, *map(torch.block_diag, upper, lower)]
    order = (
        torch.arange(n, dtype=torch.int64).view(2, half).T.reshape(-1)
    )  # one of each half in turn
    if not fourth:
        return [*most, last[order]]
    final, root = one[order], math.sqrt(0.5)
    for p in range(1, half):
        final[2 * p - 1] = root * (one[p] + one[n - p])
        final[2 * p] = root * (one[p] - one[n - p])
    final[n - 1] = one[half]
    return [*most, last, final] if half > 1 else [*most, last]
