"""Levels moved by gradient descent to where a tensor's values are (THESIS 5.6.2, C.3).

Vocabulary
    unit    a value between the minimum (0) and the maximum (1) of its block
    weight  of a block, the square of its range: what an error of its units counts
    cell    the units that go to one level; with stochastic rounding, those between two levels
"""

from __future__ import annotations

import torch

RATE = 0.01
BATCH = 1024
DRAWN = 16  # batches at a time: few enough that torch starts no threads

Tensor = torch.Tensor


def learn(
    tensor: Tensor,
    levels: tuple[float, ...],
    block: int,
    stochastic: bool,
    steps: int,
    seed: int,
) -> tuple[float, ...]:
    """The levels after `steps` of gradient descent, or those given where these are no worse.

    A step draws 1024 units, in proportion to their weight, and moves every level by 0.01 of its
    gradient, which is averaged over the units of its cells: else rarely used levels would hardly
    move. Blocks with values that are not finite are left out. The error is that of rounding to
    nearest, squared; or the variance of stochastic rounding, whose outer levels stay.
    """
    units = _Units(tensor, block)
    if units.empty:
        return levels
    given = torch.tensor(levels, dtype=torch.float64)
    moved = given.clone()
    generator = torch.Generator().manual_seed(seed)
    gradient = _stochastic_gradient if stochastic else _nearest_gradient
    for first in range(0, steps, DRAWN):
        # sorted, a batch is cut into cells by as many searches as there are bounds
        drawn = units.draw(generator, min(DRAWN, steps - first)).sort(1).values
        sums = torch.nn.functional.pad(drawn.cumsum(1), (1, 0))
        for batch, prefix in zip(drawn, sums, strict=True):
            moved -= RATE * gradient(moved, batch, prefix)
    if units.error(moved, stochastic) < units.error(given, stochastic):
        return tuple(moved.tolist())
    return levels


class _Units:
    """A tensor's values, normalised.

    Attributes:
        numel: how many.
        unit: fp32[blocks, block], the last row filled up.
        weight: fp64[blocks], relative to the greatest; 0 where a block is not finite.
    """

    def __init__(self, tensor: Tensor, block: int) -> None:
        flat = tensor.detach().reshape(-1).to("cpu", torch.float32)
        self.numel = flat.numel()
        # filled up with its last value, the last block's range stays what it is
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
        """fp64[batches, BATCH]: units, drawn in proportion to their weight."""
        blocks, block = self.unit.shape
        at, within = torch.rand(2, batches, BATCH, generator=generator, dtype=torch.float64)
        reach = self.weight.cumsum(0)
        row = torch.searchsorted(reach, at * reach[-1], right=True).clamp(max=blocks - 1)
        held = (self.numel - row * block).clamp(max=block)
        return self.unit[row, (within * held).long()].double()

    def error(self, levels: Tensor, stochastic: bool) -> float:
        """The weighted sum of the errors of all values."""
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
    """Of (unit - level)^2, the mean over each level's cell."""
    total, count = _cells(batch, prefix, (levels[1:] + levels[:-1]) / 2)
    return torch.where(count > 0, 2 * (levels - total / count), 0.0)


def _stochastic_gradient(levels: Tensor, batch: Tensor, prefix: Tensor) -> Tensor:
    """Of (unit - below)(above - unit), the mean over the two cells that meet in a level."""
    total, count = _cells(batch, prefix, levels[1:-1])
    above_low, below_high = total - levels[:-1] * count, levels[1:] * count - total
    both = count[:-1] + count[1:]
    inner = torch.where(both > 0, (above_low[:-1] - below_high[1:]) / both, 0.0)
    return torch.nn.functional.pad(inner, (1, 1))
