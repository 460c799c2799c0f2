# ruff: noqa: C417, F405
"""Codecs beyond those that are shipped: every operator, several stages and sweeps, odd fields,
selections, matrices, long chains."""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gradwire.codecs import registry as shipped
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import *  # noqa: F403
from gradwire.lang.trace import lift


def chain(value: Any, links: int) -> Any:
    """Two operators per link; each value has two uses."""
    for _ in range(links):
        value = value - value * 0.0078125
    return value


@dataclass(frozen=True)
class Everywhere(Codec):
    """Chains of elements, of numbers of blocks, of entries, of constants and of conditions."""

    links: int

    def encode(self, g: Any) -> Any:
        x = g.blocks(32)
        scale = chain(reduce(max, abs(x)), self.links)
        level, coin, same = lift(2.0**-120), lift(1.0), lift(1.0)
        code = uint(3, chain(abs(x), self.links) * 4.0)
        for k in range(self.links):
            level = level + level
            coin = where(x < k / 64, coin, coin)
            same = where(code < k + 1, same, same)
        chosen = topk(chain(abs(g), self.links), share(0.1))
        return concat(
            scale=scale, code=code, level=uint(2, where(x > 0.0, level, 0.0)), coin=trit(coin),
            same=same, chosen=chosen, value=fp32(chain(gather(g, chosen), self.links)),
        )  # fmt: skip

    def decode(self, chosen: Any, value: Any, **rest: Any) -> Any:
        return scatter(chain(value, self.links) * rest["scale"], chosen)


@dataclass(frozen=True)
class Decoded(Codec):
    """A chain in both methods."""

    links: int

    def encode(self, g: Any) -> Any:
        return concat(value=chain(g.blocks(64), self.links))

    def decode(self, value: Any) -> Any:
        return chain(value, self.links)


@dataclass(frozen=True)
class Matrices(Codec):
    """Chains of matrices, and of what spans the row."""

    links: int

    def encode(self, g: Any) -> Any:
        for _ in range(self.links // 4):
            g = rotate(g - reduce(sum, g) * 0.001, full=True)
        p, q = decomp(matrix(g, 8), 2)
        return concat(p=fp32(p), q=fp32(q))

    def decode(self, p: Any, q: Any) -> Any:
        return elements(chain(matmul(p, q), self.links))


@dataclass(frozen=True)
class Stages(Codec):
    """Two nested block reductions, with elements kept between the loops."""

    def encode(self, g: Any) -> Any:
        x = g.blocks(48)
        mean = reduce(sum, x) / count(x)
        centred = map(lambda v: sqrt(abs(v - mean)) / (1.0 + abs(mean)) + random(), x)
        spread = reduce(max, centred)
        code = map(lambda c: c * inverse(spread) * 30.0, centred)
        return concat(mean=mean, spread=fp16(spread), code=uint(5, code))

    def decode(self, mean: Any, spread: Any, code: Any) -> Any:
        return map(lambda k: mean + spread * k / 31.0, code)


@dataclass(frozen=True)
class Sweeps(Codec):
    """A tensor reduction of block norms, then one of elements that depend on it: three sweeps."""

    def encode(self, g: Any) -> Any:
        x = g.blocks(33)
        norm = reduce(sum, map(lambda v: v * v, x))
        largest = reduce(max, reduce(max, abs(x)) + norm * 0.0)
        unit = map(lambda v: v / (largest + 1.0), g)
        total = reduce(sum, unit)
        low, high = reduce(min, x), reduce(max, x)
        return concat(
            total=total, largest=bf16(largest), low=fp32(low), high=fp32(high),
            sign=uint(1, map(lambda v: v >= 0.0, x)), size=fp16(abs(unit)),
        )  # fmt: skip

    def decode(self, total: Any, largest: Any, low: Any, high: Any, sign: Any, size: Any) -> Any:
        value = map(lambda s, z: where(s > 0.0, z, -z) * (largest + 1.0), sign, size)
        return clamp(value, low, high) + total * 0.0


@dataclass(frozen=True)
class Odd(Codec):
    """Fields of every dtype and scope, every comparison, one random number per block, indices."""

    def encode(self, g: Any) -> Any:
        x = g.blocks(17)
        shift = random(scope="block") - 0.5
        odd = index() - floor(index() / 2) * 2
        big = (x > 1.0) | ~(x <= 0.5) & (x != 0.25)
        exact = (x == 0.0) | isfinite(x) & (x >= -1e30) & (x < 1e30)
        level = uint(3, reduce(max, abs(x)) * 4.0)
        return concat(
            level=level, few=uint(2, reduce(max, abs(g))), odd=uint(1, odd), big=uint(1, big),
            exact=uint(1, where(exact, 1, 0)), value=native(x + shift * 0.125), shift=bf16(shift),
            half=bf16(-x, toward="down"), seven=uint(7, abs(x) * 16.0 + random()),
        )  # fmt: skip

    def decode(self, level: Any, few: Any, odd: Any, big: Any, exact: Any, value: Any,
               shift: Any, half: Any, seven: Any) -> Any:  # fmt: skip
        flags = odd + big * 2.0 + exact * 4.0
        return value - shift * 0.125 + (half + seven / 16.0 + level + few + flags) * 1e-6


@dataclass(frozen=True)
class SharedNoise(Codec):
    """Random numbers in decode: both sides draw the same numbers."""

    def encode(self, g: Any) -> Any:
        return concat(value=fp16(g + random(shared="noise")))

    def decode(self, value: Any) -> Any:
        noise = random(shared="noise") * float("1e-3")
        return value - noise + where(value > float("inf"), 1.0, 0.0)


NUMBERS = [k * 37 % 101 / 7 for k in range(256)]


THREES = [lift(k * 0.75) for k in range(32)]


@dataclass(frozen=True)
class Looked(Codec):
    """Tables shorter and longer than their codes, one read by two loops; codes of elements, of
    blocks, and none: NaN and numbers that are not whole, negative, or beyond the table."""

    def encode(self, g: Any) -> Any:
        x = g.blocks(70)
        code = uint(3, abs(x) * 4.0)
        near = lookup([lift(v) for v in (0.0, 0.5, 1.0, 2.0, float("inf"))], code)
        error = reduce(max, abs(abs(x) - near))
        far = uint(5, near * 8.0 + where(x > 1.0, 40.0, where(x > 0.5, -3.0, 2.0)))
        odd = lookup(table(NUMBERS), x)
        top = uint(8, reduce(max, abs(x)) * 40.0)
        sign = uint(1, where(x < 0.0, 1, 0))
        return concat(error=error, top=top, code=code, far=far, odd=odd, sign=sign)

    def decode(self, error: Any, top: Any, code: Any, far: Any, odd: Any, sign: Any) -> Any:
        numbers = table(NUMBERS)
        many = lookup(THREES, far) + lookup(THREES, far * 0.7) + lookup(numbers, far * 8.3)
        many += lookup(numbers, top) + lookup(numbers[3:], uint(8, odd)) + odd
        crossed = where(code < 3.0, 1.5, where(code < 2.0, 8.0, where(code < 6.0, 0.25, -1.0)))
        few = lookup([lift(k * k * 0.5) for k in range(5)], code)
        return (few + many + crossed) * where(sign > 0.0, -1.0, 1.0) + error


@dataclass(frozen=True)
class Redrawn(Codec):
    """Random numbers of both scopes, which decode gives again, in another order of use; a sum draws
    one more."""

    def encode(self, g: Any) -> Any:
        x = g.blocks(40)
        shift, each = random("block"), random()
        largest = fp32(reduce(max, abs(x)) + shift)
        code = map(lambda v: (v * inverse(largest) + 1.0) * 7.0 + each, x)
        return concat(largest=largest, code=uint(4, code))

    def encode_sum(self, g: Any) -> Any:
        payload = self.encode(g)
        (_, largest), (_, code) = payload.fields
        return concat(largest=largest, code=uint(4, code * 1.0 + random() * 0.5))

    def decode(self, largest: Any, code: Any) -> Any:
        shift, each = random("block"), random()
        return ((code - each) / 7.0 - 1.0) * largest + 1e-3 * shift


LEVELS = (-1.0, -0.3, 0.0, 0.2, 0.9)


@dataclass(frozen=True)
class Rotated(Codec):
    """A transform in a fold, and a block size that is not a power of two."""

    block: int = 100

    def encode(self, g: Value) -> Payload:
        x = rotate(g.blocks(self.block))
        low = fp32(reduce(min, x))
        step = fp32((reduce(max, x) - low) / 15)
        code = map(lambda v: (v - low) * inverse(step) + 0.5, x)
        return concat(low=low, step=step, code=uint(4, code))

    def decode(self, low: Value, step: Value, code: Value) -> Value:
        return rotate(low + step * code, inverse=True)


@dataclass(frozen=True)
class Kept(Codec):
    """Trits that most blocks omit."""

    def encode(self, g: Value) -> Payload:
        x = g.blocks(32)
        scale = fp32(reduce(max, abs(g)))
        code = trit(x * inverse(scale) + 1.5)
        kept = uint(1, where(count(code != 1) > 0, 1, 0))
        return concat(scale=scale, kept=kept, code=keep(code, kept))

    def decode(self, scale: Value, kept: Value, code: Value) -> Value:
        return where(kept > 0, scale * (code - 1.0), 0.0)


@dataclass(frozen=True)
class Sampled(Codec):
    """A threshold from a sample: of values in encode, of a sum in reduce_encode."""

    def encode(self, g: Value) -> Payload:
        size = abs(g)
        threshold = sort(size, every=10)[share(0.02, 2)]
        chosen = topk(size, share(0.01), among=size >= threshold)
        return concat(chosen=chosen, value=fp16(gather(g, chosen)))

    def decode(self, chosen: Value, value: Value) -> Value:
        return scatter(value, chosen)


@dataclass(frozen=True)
class Mixed(Codec):
    """Entries as codes scaled per block, and a block size that is not a power of two."""

    def encode(self, g: Value) -> Payload:
        x = g.blocks(300)
        top = bf16(reduce(max, abs(x)))
        chosen = filter(abs(g) >= top * 0.5, share(0.3))
        code = clamp((g * inverse(top) + 1.0) * 4.0, 0, 7)
        return concat(top=top, chosen=chosen, code=uint(3, gather(code, chosen)))

    def decode(self, top: Value, chosen: Value, code: Value) -> Value:
        return scatter((code / 4.0 - 1.0) * top, chosen)


@dataclass(frozen=True)
class Dithered(Codec):
    """Entries as codes whose random numbers are redrawn."""

    def encode(self, g: Value) -> Payload:
        x = g.blocks(200)
        top = fp32(reduce(max, abs(x)))
        chosen = topk(abs(g), share(0.1))
        code = (g * inverse(top) + 1.0) * 7.0 + random()
        return concat(top=top, chosen=chosen, code=uint(4, gather(code, chosen)))

    def decode(self, top: Value, chosen: Value, code: Value) -> Value:
        return scatter(((code + (0.5 - gather(random(), chosen))) / 7.0 - 1.0) * top, chosen)


@dataclass(frozen=True)
class Tabled(Codec):
    """Levels that are passed to kernels."""

    levels: tuple[float, ...] = LEVELS

    def encode(self, g: Value) -> Payload:
        x = g.blocks(64)
        levels = table(self.levels)
        scale = fp32(reduce(max, abs(x)))
        unit = x * inverse(scale)
        middles = [(a + b) * 0.5 for a, b in pairwise(levels)]
        above = [where(unit > middle, 1, 0) for middle in middles]
        return concat(scale=scale, code=uint(3, builtins.sum(above[1:], start=above[0])))

    def decode(self, scale: Value, code: Value) -> Value:
        return scale * lookup(table(self.levels), code)


@dataclass(frozen=True)
class Integers(Codec):
    """32-bit integers in every scope."""

    def encode(self, g: Value) -> Payload:
        x = g.blocks(50)
        chosen = filter(abs(g) >= 0.5, share(0.5))
        return concat(
            total=int32(reduce(sum, abs(g)) * 1e6),
            top=int32(reduce(max, x) * 1e9),
            each=int32(x * 1e3),
            chosen=chosen,
            value=int32(gather(g * 1e5, chosen)),
        )

    def decode(self, chosen: Value, value: Value, **fields: Value) -> Value:
        return scatter(value * 1e-5 + fields["total"] * 0.0, chosen)


@dataclass(frozen=True)
class Residual(Codec):
    """Low rank and the signs of the rest: every operator on matrices, in encode and in decode."""

    columns: int = 8
    rank: int = 2

    def encode(self, g: Any) -> Any:
        p, q = decomp(matrix(g, self.columns), self.rank)
        p, q = bf16(p), fp32(q)
        rest = g - elements(where(isfinite(matmul(p, q)), matmul(p, q), 0.0) * 1.0)
        return concat(p=p, q=q, largest=reduce(max, abs(rest)), sign=uint(1, rest >= 0.0))

    def decode(self, p: Any, q: Any, largest: Any, sign: Any) -> Any:
        gram = matmul(matmul(q, q), matmul(q, q))  # columns x columns
        product = matmul(p, q) + 0.0 * largest + 0.0 * matmul(matmul(p, q), gram)
        return elements(product) + where(sign > 0.0, largest, -largest) * 0.25


@dataclass(frozen=True)
class Square(Codec):
    """A factor as wide as the matrix has the shape of the row."""

    def encode(self, g: Any) -> Any:
        p, q = decomp(matrix(g, 2), 2)
        return concat(p=bf16(p), q=fp32(q))

    def decode(self, p: Any, q: Any) -> Any:
        return elements(p) + 0.0 * elements(matmul(p, q))


@dataclass(frozen=True)
class ManyBlocks(Codec):
    """Reductions over more blocks than one pass reduces."""

    def encode(self, g: Any) -> Any:
        x = g.blocks(2)
        total, largest = reduce(sum, reduce(sum, x)), reduce(max, reduce(max, abs(x)))
        code = map(lambda v: (v / largest + 1.0) * 7.0, x)
        return concat(total=total, largest=largest, code=uint(4, code))

    def decode(self, total: Any, largest: Any, code: Any) -> Any:
        return map(lambda k: (k / 7.0 - 1.0) * largest + total * 0.0, code)


@dataclass(frozen=True)
class Trits(Codec):
    """Entries packed five per byte, in several runs, followed by numbers."""

    def encode(self, g: Any) -> Any:
        x = g.blocks(200)
        chosen = topk(abs(g), share(0.9))
        value = gather(g, chosen)
        return concat(chosen=chosen, sign=trit(gather(x * 1e9 + 1.0, chosen)), value=value)

    def decode(self, chosen: Any, sign: Any, value: Any) -> Any:
        return scatter(value + sign * 0.0, chosen)


ODD: list[Codec] = [Stages(), Sweeps(), Odd(), SharedNoise(), Looked(), Redrawn()]
SELECTIONS: list[Codec] = [
    *(shipped.TopK(), shipped.TopK(0.3, "fp32"), Rotated(), Kept(), Sampled(), Mixed(), Tabled()),
    *(Integers(), Dithered()),
]
MATRICES: list[Codec] = [
    *(shipped.LowRank(2, 50), shipped.LowRank(1, 1)),
    *(Residual(), Residual(5, 5), Square()),
]
