"""Levels moved by gradient descent to where a tensor's values are (THESIS 5.6.2, C.3).

Vocabulary
    unit    a value between the minimum (0) and the maximum (1) of its block
    weight  of a block, the square of its range: what an error of its units counts
    cell    the values that a level serves; with stochastic rounding, those between two levels
"""

from __future__ import annotations

import torch

RATE = 0.01
BATCH = 1024

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

    A step draws 1024 values, in proportion to their weight, and moves every level by 0.01 of its
    gradient, which is averaged over the values of its cells: else rarely used levels would hardly
    move. Blocks with values that are not finite are left out. The error is that of rounding to
    nearest, squared; or the variance of stochastic rounding, whose outer levels stay.
    """
    units = _Units(tensor, block)
    if units.empty:
        return levels
    given = torch.tensor(levels, dtype=torch.float32)
    moved = given.clone()
    generator = torch.Generator().manual_seed(seed)
    gradient = _stochastic_gradient if stochastic else _nearest_gradient
    for _ in range(steps):
        moved -= RATE * gradient(moved, units.draw(generator))
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
        missing = -self.numel % block
        # filled up with its last value, the range of the last block stays what it is
        x = torch.cat([flat, flat[-1:].expand(missing)]).view(-1, block)
        low, half = x[:, :0].sum(1, keepdim=True), x[:, :0].sum(1, keepdim=True)
        if self.numel:
            low = x.amin(1, keepdim=True)
            half = x.amax(1, keepdim=True) / 2 - low / 2
        usable = torch.isfinite(half) & (half > 0.0)
        self.unit = torch.where(usable, (x / 2 - low / 2) / half, 0.0)
        size = torch.where(usable, half, 0.0).double().view(-1)
        self.weight = (size / size.max()) ** 2 if bool(usable.any()) else size
        self._reach = self.weight.cumsum(0)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to learn from."""
        return not bool((self.weight > 0.0).any())

    def draw(self, generator: torch.Generator) -> Tensor:
        """fp32[BATCH]: units, drawn in proportion to their weight."""
        blocks, block = self.unit.shape
        at, within = torch.rand(2, BATCH, generator=generator, dtype=torch.float64)
        row = torch.searchsorted(self._reach, at * self._reach[-1], right=True)
        row = row.clamp(max=blocks - 1)
        held = (self.numel - row * block).clamp(max=block)
        return self.unit[row, (within * held).long()]

    def error(self, levels: Tensor, stochastic: bool) -> float:
        """The weighted sum of the errors of all values."""
        if stochastic:
            cell = _below(levels[1:-1], self.unit)
            error = (self.unit - levels[cell]) * (levels[cell + 1] - self.unit)
        else:
            error = (self.unit - levels[_below(_middles(levels), self.unit)]) ** 2
        error.view(-1)[self.numel :] = 0.0
        return float((error.sum(1, dtype=torch.float64) * self.weight).sum())


def _below(bounds: Tensor, unit: Tensor) -> Tensor:
    """How many of the ascending bounds are not above each unit."""
    return torch.bucketize(unit, bounds.contiguous(), right=True)


def _middles(levels: Tensor) -> Tensor:
    return (levels[1:] + levels[:-1]) / 2


def _nearest_gradient(levels: Tensor, unit: Tensor) -> Tensor:
    """Of (unit - level)^2, the mean over each level's cell."""
    cell = _below(_middles(levels), unit)
    total, count = _sums(cell, unit, len(levels))
    return torch.where(count > 0, 2 * (levels - total / count), 0.0)


def _stochastic_gradient(levels: Tensor, unit: Tensor) -> Tensor:
    """Of (unit - below)(above - unit), the mean over the two cells that a level bounds."""
    cell = _below(levels[1:-1], unit)
    rise, count = _sums(cell, unit - levels[cell], len(levels) - 1)
    fall, _ = _sums(cell, levels[cell + 1] - unit, len(levels) - 1)
    both = count[:-1] + count[1:]
    inner = torch.where(both > 0, (rise[:-1] - fall[1:]) / both, 0.0)
    return torch.nn.functional.pad(inner, (1, 1))


def _sums(cell: Tensor, values: Tensor, cells: int) -> tuple[Tensor, Tensor]:
    """Of every cell, the sum of its values and their number."""
    total = torch.bincount(cell, weights=values, minlength=cells)
    return total.float(), torch.bincount(cell, minlength=cells)
