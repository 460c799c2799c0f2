"""Families of choices: which methods a policy may give a layer, around a reference.

    Bits      qsgd: d/2 to 2 d bits, by 1, in one block size or several (CGX 5)
    CodecBits another codec, as that of FSDP2's weights: d/2 to 2 d bits, by 1
    Density   topk: d/10 to 10 d, by d/10 (THESIS 4.6); or in equal ratios, over more decades
    Rank      PowerSGD: ranks d/2 to 2 d, by 1
    Mixture   all choices of several families; the reference is the first one's
    Feedback  those of a family that error feedback suits

A reference is what the uniform plan gives every layer. Densities and ranks need error feedback, and
so does every plan of a mixed family that has them.

Parameters of fewer than two dimensions have one choice, bf16. A rank that would not shrink a matrix
is the choice to send it dense.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch

from gradwire.aggregators import Aggregator, Compressed, Dense, PowerSGD
from gradwire.codecs import QSGD, RandomShift, TopK
from gradwire.errors import ConfigError

N = TypeVar("N", int, float)

FLAT = Dense(torch.bfloat16)  # of parameters of fewer than two dimensions


@dataclass(frozen=True)
class Family:
    """The choices of a layer.

    Attributes:
        name: in rows.
    """

    name: ClassVar[str]

    def reference(self, shape: tuple[int, ...]) -> Aggregator:
        """What the uniform plan gives a layer of this shape."""
        raise NotImplementedError(f"{type(self).__name__} defines no reference")

    def methods(self, shape: tuple[int, ...]) -> list[Aggregator]:
        """The choices, the reference among them, each once."""
        raise NotImplementedError(f"{type(self).__name__} defines no methods")


def _given(option: N | None, default: N) -> N:
    return default if option is None else option


def _shrinking(method: PowerSGD, shape: tuple[int, ...]) -> Aggregator:
    return method if method.shrinks(shape) else Dense()


def _check_range(family: str, given: tuple[float, float], reference: float) -> None:
    low, high = given
    if not 0 < low <= reference <= high:
        raise ConfigError(
            f"{family}: choices from {low} to {high}: give a range above 0 that holds the "
            f"reference, {reference}"
        )


@dataclass(frozen=True)
class Bits(Family):
    """qsgd with several numbers of bits.

    Args:
        bits, block: of the reference.
        least, most: bits of choices; by default half and twice the reference's, within 2 to 8.
        blocks: block sizes of choices, beside the reference's.

    Raises:
        ConfigError: a number out of range.
    """

    bits: int = 4
    block: int = 128
    least: int | None = None
    most: int | None = None
    blocks: tuple[int, ...] = ()

    name = "bits"

    def __post_init__(self) -> None:
        _check_range("Bits", self._range, self.bits)
        self.methods((1, 1))

    @property
    def _range(self) -> tuple[int, int]:
        low, high = max(2, self.bits // 2), min(8, 2 * self.bits)
        return _given(self.least, min(low, self.bits)), _given(self.most, high)

    def reference(self, shape: tuple[int, ...]) -> Aggregator:
        return Compressed(QSGD(bits=self.bits, block=self.block))

    def methods(self, shape: tuple[int, ...]) -> list[Aggregator]:
        low, high = self._range
        sizes = sorted({self.block, *self.blocks})
        codecs = [QSGD(bits=b, block=size) for b in range(low, high + 1) for size in sizes]
        return [Compressed(codec) for codec in codecs]


@dataclass(frozen=True)
class CodecBits(Family):
    """A codec with several numbers of bits: half to twice the reference's, within 2 to 8.

    Args:
        codec: of the reference.
    """

    codec: RandomShift | QSGD

    name = "bits"

    def reference(self, shape: tuple[int, ...]) -> Aggregator:
        return Compressed(self.codec)

    def methods(self, shape: tuple[int, ...]) -> list[Aggregator]:
        bits = self.codec.bits
        low, high = min(bits, max(2, bits // 2)), max(bits, min(8, 2 * bits))
        return [Compressed(replace(self.codec, bits=b)) for b in range(low, high + 1)]


@dataclass(frozen=True)
class Density(Family):
    """topk with several densities.

    Args:
        density: of the reference, d.
        least, most: of the choices; by default d/10 and 10 d, at most 1.
        step: between densities; by default d/10.
        per_decade: of densities in equal ratios, in place of `step`; by default from d / 10^4 to 1.
            Large layers can then send next to nothing, and small ones all.

    Raises:
        ConfigError: a number out of range, or both `step` and `per_decade`.
    """

    density: float = 0.01
    least: float | None = None
    most: float | None = None
    step: float | None = None
    per_decade: int | None = None

    name = "topk"

    def __post_init__(self) -> None:
        TopK(density=self.density)
        if self.step is not None and not 0 < self.step < 1:
            raise ConfigError(f"Density: step={self.step!r}: give a number above 0 and below 1")
        if self.per_decade is not None:
            if type(self.per_decade) is not int or not 1 <= self.per_decade <= 100:
                raise ConfigError(f"Density: per_decade={self.per_decade!r}: give 1 to 100")
            if self.step is not None:
                raise ConfigError("Density: step and per_decade exclude each other: give one")
        _check_range("Density", self._range, self.density)

    @property
    def _range(self) -> tuple[float, float]:
        d = self.density
        if self.per_decade is not None:
            return _given(self.least, d * 1e-4), _given(self.most, 1.0)
        return _given(self.least, d / 10), _given(self.most, min(1.0, 10 * d))

    def reference(self, shape: tuple[int, ...]) -> Aggregator:
        return Compressed(TopK(density=self.density))

    def methods(self, shape: tuple[int, ...]) -> list[Aggregator]:
        if self.per_decade is not None:
            return self._by_ratio(math.prod(shape), self.per_decade)
        low, high = self._range
        step = self.step or self.density / 10
        steps = range(round((high - low) / step) + 1)
        found = {round(min(low + i * step, high, 1.0), 12) for i in steps} | {self.density, high}
        return [Compressed(TopK(density=density)) for density in sorted(found)]

    def _by_ratio(self, numel: int, per_decade: int) -> list[Aggregator]:
        """One density for each number of values that is sent, the reference's among them."""
        low, high = self._range
        steps = range(math.floor(math.log10(high / low) * per_decade + 1e-9) + 1)
        densities = [float(f"{low * 10 ** (i / per_decade):.3g}") for i in steps]
        found: dict[int, float] = {}
        for density in (self.density, high, *densities):
            found.setdefault(max(1, math.floor(density * numel)), min(density, 1.0))
        return [Compressed(TopK(density=density)) for density in sorted(found.values())]


@dataclass(frozen=True)
class Rank(Family):
    """PowerSGD with several ranks.

    Args:
        rank: of the reference.
        least, most: of the choices; by default half and twice the reference's.

    Raises:
        ConfigError: a number out of range.
    """

    rank: int = 4
    least: int | None = None
    most: int | None = None

    name = "rank"

    def __post_init__(self) -> None:
        PowerSGD(rank=self.rank)
        _check_range("Rank", self._range, self.rank)

    @property
    def _range(self) -> tuple[int, int]:
        return _given(self.least, max(1, self.rank // 2)), _given(self.most, 2 * self.rank)

    def reference(self, shape: tuple[int, ...]) -> Aggregator:
        return _shrinking(PowerSGD(rank=self.rank), shape)

    def methods(self, shape: tuple[int, ...]) -> list[Aggregator]:
        low, high = self._range
        found = [_shrinking(PowerSGD(rank=rank), shape) for rank in range(low, high + 1)]
        return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Mixture(Family):
    """All choices of several families.

    Args:
        families: the first has the reference.

    Raises:
        ConfigError: there are none.
    """

    families: tuple[Family, ...] = (Bits(), Density(), Rank())

    name = "mixed"

    def __post_init__(self) -> None:
        if not self.families:
            raise ConfigError("Mixture: families=(): give one or more")

    def reference(self, shape: tuple[int, ...]) -> Aggregator:
        return self.families[0].reference(shape)

    def methods(self, shape: tuple[int, ...]) -> list[Aggregator]:
        found = [method for family in self.families for method in family.methods(shape)]
        return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Feedback(Family):
    """The choices of a family whose error is at most what they encode, and the reference: around
    others error feedback adds errors up (`Aggregator.contracts`).

    Args:
        family: has the reference.
    """

    family: Family

    name = "feedback"

    def reference(self, shape: tuple[int, ...]) -> Aggregator:
        return self.family.reference(shape)

    def methods(self, shape: tuple[int, ...]) -> list[Aggregator]:
        at = self.reference(shape)
        return [method for method in self.family.methods(shape) if method.contracts or method == at]


FAMILIES: dict[str, type[Family]] = {
    "bits": Bits, "topk": Density, "rank": Rank, "mixed": Mixture,
}  # fmt: skip
