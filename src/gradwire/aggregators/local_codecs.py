"""Codecs whose payloads are an aggregator's local memory: squares, rotations, rounding to a grid.

No message carries these payloads; `run_local` calls their kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import (
    abs,
    bf16,
    clamp,
    concat,
    count,
    floor,
    fp32,
    index,
    inverse,
    isfinite,
    map,
    random,
    reduce,
    rotate,
    sqrt,
    where,
)

_LEAST_NORM, _MOST_NORM = 2.0**-63, 2.0**55


@dataclass(frozen=True)
class ChunkSquares(Codec):
    """The squared L2 norm of every chunk of `chunk` values, as bf16.

    Norms other than 0 are taken as 2^-63 at least and 2^55 at most, so that no square vanishes, and
    no sum of 2^17 of them overflows. Values are divided by the largest for their norm, so it is
    right whatever their scale. Of non-finite values it is NaN. (Decoding gives each value its
    chunk's square.)
    """

    chunk: int

    def encode(self, g: Value) -> Payload:
        x = g.blocks(self.chunk)
        largest = reduce(max, map(abs, x))
        unit = map(lambda v: v * inverse(largest), x)
        norm = largest * sqrt(reduce(sum, unit * unit))
        within = clamp(norm, _LEAST_NORM, _MOST_NORM)
        return concat(square=bf16(where(norm > 0.0, within * within, norm)))

    def decode(self, square: Value) -> Value:
        return map(lambda at: square + 0.0 * at, index())


@dataclass(frozen=True)
class Rounded(Codec):
    """Encoding rotates chunks and finds their ranges; decoding rounds to whole numbers at random.

    Options:
        chunk: values per chunk.
        most: the whole number that stands for the range.
        rotated: whether to rotate.

    Between the two, ranks agree on the ranges in the payload. The shared random numbers are signs
    in encoding, and the rounding in decoding. A chunk of range 0 gives zeros.
    """

    chunk: int
    most: int
    rotated: bool

    def encode(self, g: Value) -> Payload:
        x = g.blocks(self.chunk)
        x = rotate(x) if self.rotated else x
        return concat(value=fp32(x), size=bf16(reduce(max, map(abs, x)), toward="up"))

    def decode(self, value: Value, size: Value) -> Value:
        steps, offset = inverse(size) * self.most, random(shared="rounding")
        return clamp(floor(value * steps + offset), -self.most, self.most)


@dataclass(frozen=True)
class Restored(Codec):
    """Decoding turns whole numbers and ranges into values, and rotates them back; see `Rounded`.

    Values of a chunk whose range is not finite are NaN.
    """

    chunk: int
    most: int
    rotated: bool

    def encode(self, g: Value) -> Payload:
        x = g.blocks(self.chunk)
        return concat(value=fp32(x), size=bf16(reduce(max, map(abs, x)), toward="up"))

    def decode(self, value: Value, size: Value) -> Value:
        step = where(isfinite(size), size * (1.0 / self.most), math.nan)
        x = value * step
        return rotate(x, inverse=True) if self.rotated else x


@dataclass(frozen=True)
class Turned(Codec):
    """Every chunk of `chunk` values rotated, as fp32."""

    chunk: int

    def encode(self, g: Value) -> Payload:
        return concat(value=fp32(rotate(g.blocks(self.chunk))))

    def decode(self, value: Value) -> Value:
        return rotate(value, inverse=True)


@dataclass(frozen=True)
class Ends(Codec):
    """How many values have a magnitude of `most` or more."""

    most: int

    def encode(self, g: Value) -> Payload:
        return concat(ends=fp32(count(map(abs, g) >= self.most)))

    def decode(self, ends: Value) -> Value:
        return map(lambda at: ends + 0.0 * at, index())
