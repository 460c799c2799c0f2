"""Quantisation levels fitted to a tensor's values by gradient descent (THESIS 5.6.2, C.3).

Vocabulary
    unit    a value between the minimum (0) and the maximum (1) of its block
    weight  the squared range of a block: how much the errors of its units count
    cell    the units that round to one level; with stochastic rounding, those between two levels
"""

from __future__ import annotations

from collections.abc import Callable

import torch

RATE = 0.01
BATCH = 1024
BATCHES_PER_DRAW = 16  # few enough that torch starts no threads

Tensor = torch.Tensor


def learn(
    tensor: Tensor,
    levels: tuple[float, ...],
    block: int,
    stochastic: bool,
    steps: int,
    seed: int,
    check: Callable[[], object] = lambda: None,
) -> tuple[float, ...]:
    """The levels after `steps` of gradient descent, or the given ones if those are no worse.

    A step draws 1024 units, in proportion to their weight, and moves every level by 0.01 times its
    gradient. The gradient is averaged over the units of the level's cells; otherwise rarely used
    levels would hardly move. Blocks with non-finite values are ignored. The error is the squared
    error of rounding to nearest, or the variance of stochastic rounding, whose outer levels are
    fixed. `check` is called every few milliseconds, but not while all units are looked at, as they
    are at the begin and at the end; what it raises ends the descent.
    """
    units = _Units(tensor, block)
    if units.empty:
        return levels
    given = torch.tensor(levels, dtype=torch.float64)
    moved = given.clone()
    generator = torch.Generator().manual_seed(seed)
    gradient = _stochastic_gradient if stochastic else _nearest_gradient
    for first in range(0, steps, BATCHES_PER_DRAW):
        check()
        # a sorted batch is divided into cells by one binary search per bound
        drawn = units.draw(generator, min(BATCHES_PER_DRAW, steps - first)).sort(1).values
        sums = torch.nn.functional.pad(drawn.cumsum(1), (1, 0))
        for batch, prefix in zip(drawn, sums, strict=True):
            moved -= RATE * gradient(moved, batch, prefix)
    if units.error(moved, stochastic) < units.error(given, stochastic):
        return tuple(moved.tolist())
    return levels


class _Units:
    """A tensor's values, normalised.

    Attributes:
        numel: number of values.
        unit: fp32[blocks, block], the last row padded.
        weight: fp64[blocks], relative to the largest; 0 for a block with non-finite values.
    """

    def __init__(self, tensor: Tensor, block: int) -> None:
        flat = tensor.detach().reshape(-1).to("cpu", torch.float32)
        self.numel = flat.numel()
        # padding with the last value keeps the range of the last block
        x = torch.cat([flat, flat[-1:].expand(-self.numel % block)]).view(-1, block)
        low = x.amin(1, keepdim=True)
        half = x.amax(1, keepdim=True) / 2 - low / 2
        usable = torch.isfinite(half) & (half > 0.0)
        self.unit = torch.where(usable, (x / 2 - low / 2) / half, 0.0)
        size = torch.where(usable, half, 0.0).double().view(-1)
        self.weight = (size / size.max()) ** 2 if bool(usable.any()) else size

    @property
    def empty(self) -> bool:
        """Whether there is nothing to learn from."""
        return not bool((self.weight > 0.0).any())

    def draw(self, generator: torch.Generator, batches: int) -> Tensor:
        """fp64[batches, BATCH]: units drawn in proportion to their weight."""
        blocks, block = self.unit.shape
        at, within = torch.rand(2, batches, BATCH, generator=generator, dtype=torch.float64)
        reach = self.weight.cumsum(0)
        row = torch.searchsorted(reach, at * reach[-1], right=True).clamp(max=blocks - 1)
        held = (self.numel - row * block).clamp(max=block)
        return self.unit[row, (within * held).long()].double()

    def error(self, levels: Tensor, stochastic: bool) -> float:
        """The weighted sum of the errors of all units."""
        levels = levels.float()
        bounds = levels[1:-1] if stochastic else (levels[1:] + levels[:-1]) / 2
        cell = torch.bucketize(self.unit, bounds.contiguous(), right=True)
        error = self.unit - levels[cell]
        error *= levels[cell + 1] - self.unit if stochastic else error.clone()
        error.view(-1)[self.numel :] = 0.0
        return float((error.sum(1, dtype=torch.float64) * self.weight).sum())


def _cells(batch: Tensor, prefix: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of units, number of units) of the cells between the ascending bounds."""
    at = torch.searchsorted(batch, bounds)
    at = torch.nn.functional.pad(at, (1, 0))
    at = torch.nn.functional.pad(at, (0, 1), value=BATCH)
    return prefix[at].diff(), at.diff()


def _nearest_gradient(levels: Tensor, batch: Tensor, prefix: Tensor) -> Tensor:
    """The gradient of the mean of (unit - level)^2 over each level's cell."""
    total, count = _cells(batch, prefix, (levels[1:] + levels[:-1]) / 2)
    return torch.where(count > 0, 2 * (levels - total / count), 0.0)


def _stochastic_gradient(levels: Tensor, batch: Tensor, prefix: Tensor) -> Tensor:
    """The gradient of the mean of (unit - below)(above - unit) over a level's two cells."""
    total, count = _cells(batch, prefix, levels[1:-1])
    above_low, below_high = total - levels[:-1] * count, levels[1:] * count - total
    both = count[:-1] + count[1:]
    inner = torch.where(both > 0, (above_low[:-1] - below_high[1:]) / both, 0.0)
    return torch.nn.functional.pad(inner, (1, 1))
