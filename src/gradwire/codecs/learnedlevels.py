"""LearnedLevels: quantisation levels learned from a layer's own values (THESIS 5.6.2, C.3)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gradwire.codecs import checks
from gradwire.errors import ConfigError
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import concat, fp32, inverse, lookup, map, random, reduce, table, uint, where

if TYPE_CHECKING:  # codecs are also compiled where torch is not installed
    import torch


@dataclass(frozen=True)
class LearnedLevels(Codec):
    """2^bits levels between the minimum and the maximum of every block.

    Options:
        bits: of a code, 2 to 6; the thesis found no gain beyond 6.
        block: values that share a minimum and a maximum, 1 to 65536.
        rounding: "nearest", or "stochastic", which is unbiased.
        levels: 2^bits ascending numbers from 0 (the minimum) to 1 (the maximum), 0 and 1
            included for "stochastic"; None: evenly spaced. `learn` finds them.

    Kernels receive the levels as arguments, so new levels need no compilation. All ranks must have
    the same levels: learn on one rank and broadcast. Constant blocks decode exactly; a non-finite
    value makes its block non-finite.
    """

    bits: int = 4
    block: int = 1024
    rounding: str = "nearest"
    levels: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        checks.integer(self, "bits", 2, 6)
        checks.integer(self, "block", 1, checks.MAX_BLOCK)
        checks.one_of(self, "rounding", ("nearest", "stochastic"))
        if self.levels is not None:
            levels: Any = self.levels
            if isinstance(levels, list | tuple) or getattr(levels, "ndim", 0) == 1:
                plain = tuple(checks.plain(level) for level in levels)  # a list has no hash
                object.__setattr__(self, "levels", plain)
            self._check_levels()

    def encode(self, g: Value) -> Payload:
        x = g.blocks(self.block)
        low = fp32(reduce(min, x))
        half = fp32(reduce(max, x) * 0.5 - low * 0.5)
        # where, between two levels, a value rounds up: half way, or at a random point
        way = 0.5 if self.rounding == "nearest" else 1.0 - random()
        bounds = [a + (b - a) * way for a, b in pairwise(table(self.grid))]
        unit = map(lambda v: (v * 0.5 - low * 0.5) * inverse(half), x)
        code: Value | int
        if self.rounding == "nearest":
            code = _reached(bounds, unit)
        else:  # every value has its own bounds, and computing them costs more than comparing
            code = sum(where(unit >= bound, 1.0, 0.0) for bound in bounds)
        return concat(low=low, half=half, code=uint(self.bits, code))

    def decode(self, low: Value, half: Value, code: Value) -> Value:
        level = lookup(table(self.grid), code)
        return map(lambda u: low + half * u + half * u, level)

    @property
    def grid(self) -> tuple[float, ...]:
        """The levels; evenly spaced ones if none were given."""
        top = 2**self.bits - 1
        return tuple(k / top for k in range(top + 1)) if self.levels is None else self.levels

    @property
    def contracts(self) -> bool:
        """Whether the error of zeros midway between two levels is at most the signal of a block
        that has only its ends besides them."""
        around = (-self.grid[0], *self.grid, 2 - self.grid[-1])  # 0 and 1 midway, if no levels
        middles = [((a + b) / 2, (b - a) / 2) for a, b in pairwise(around)]
        return all(self.block * far**2 <= u**2 + (1 - u) ** 2 for u, far in middles)

    @classmethod
    def learn(
        cls,
        tensor: torch.Tensor,
        bits: int = 4,
        block: int = 1024,
        rounding: str = "nearest",
        *,
        steps: int = 2000,
        seed: int = 0,
    ) -> LearnedLevels:
        """The codec with levels learned from a tensor; even levels never have a smaller error.

        Args:
            tensor: of any shape, dtype and device. Learning pays above 10^5 values.
            steps, seed: see `learning.learn`. 2000 steps take about half a second. The best levels
                change slowly during training, so learn rarely.
        """
        from gradwire.codecs import learning

        even = cls(bits, block, rounding)
        levels = learning.learn(tensor, even.grid, block, rounding == "stochastic", steps, seed)
        return even if levels == even.grid else cls(bits, block, rounding, levels)

    def _check_levels(self) -> None:
        given = self.levels if isinstance(self.levels, tuple) else ()
        numbers = all(type(x) in (int, float) for x in given) and len(given) == 2**self.bits
        if not (numbers and _ascending((0.0, *given, 1.0))):
            raise ConfigError(
                f"LearnedLevels: levels={self.levels!r} must be {2**self.bits} ascending numbers "
                "from 0 to 1"
            )
        if self.rounding == "stochastic" and (self.grid[0], self.grid[-1]) != (0.0, 1.0):
            raise ConfigError(
                f"LearnedLevels: levels={self.levels!r} must begin with 0 and end with 1 "
                "when rounding is stochastic"
            )
        object.__setattr__(self, "levels", tuple(float(level) for level in given))


def _reached(bounds: list[Value], unit: Value) -> Value:
    """How many of 2^n - 1 ascending bounds are at most `unit`: binary search, n comparisons."""
    half = len(bounds) // 2
    above = unit >= bounds[half]
    code = where(above, half + 1, 0)
    if half == 0:
        return code
    rest = [where(above, b, a) for a, b in zip(bounds, bounds[half + 1 :], strict=False)]
    return code + _reached(rest[:half], unit)


def _ascending(numbers: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in pairwise(numbers))
