"""Numbers in Triton: bits, conversions to and from stored dtypes, random numbers.

lang/semantics.py defines these functions; this file and prelude.h must give the same bits. Only
generated code and the files next to this one import it.
"""

from __future__ import annotations

import triton
import triton.language as tl

NAN = tl.constexpr(0x7FC00000)
INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(0x80000000)
LEAST = tl.constexpr(-(2**31))
MOST = tl.constexpr(2**31 - 1)


@triton.jit
def bits_of(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def int_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def number(BITS: tl.constexpr):
    """A float32 from its bits, for values that a literal would change."""
    return tl.full((), BITS, tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def negative(x):
    return float_of(bits_of(x) ^ SIGN)


@triton.jit
def key_of(x):
    """Unsigned keys in the order of the numbers, any NaN the largest; never 0."""
    bits = bits_of(x)
    key = tl.where(bits >= SIGN, bits ^ 0xFFFFFFFF, bits | SIGN)
    return tl.where((bits & MAGNITUDE) > INFINITY, tl.full((), 0xFFC00000, tl.uint32), key)


@triton.jit
def from_key(key):
    return float_of(tl.where(key >= SIGN, key ^ SIGN, key ^ 0xFFFFFFFF))


@triton.jit
def floor(x):
    """Unlike tl.floor, does not flush subnormal numbers to 0 on some GPUs."""
    small = tl.abs(x) < 8388608.0  # larger numbers are integers
    whole = tl.where(small, x, 0.0).to(tl.int32).to(tl.float32)
    whole = tl.where(whole > x, whole - 1.0, whole)
    return tl.where(small & (whole != x), whole, x)


@triton.jit
def is_finite(x):
    return (bits_of(x) & MAGNITUDE) < INFINITY


@triton.jit
def to_fp32(x):
    return tl.where(x == x, x, number(NAN))


@triton.jit
def to_bf16_nearest(x):
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    r = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    return _bf16(r, bits, magnitude)


@triton.jit
def to_bf16_down(x):
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    r = (magnitude >> 16) + (((bits >> 31) != 0) & ((magnitude & 0xFFFF) != 0)).to(tl.uint32)
    return _bf16(r, bits, magnitude)


@triton.jit
def to_bf16_up(x):
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    r = (magnitude >> 16) + (((bits >> 31) == 0) & ((magnitude & 0xFFFF) != 0)).to(tl.uint32)
    return _bf16(r, bits, magnitude)


@triton.jit
def _bf16(r, bits, magnitude):
    """Saturate a rounded magnitude, keep infinities, make NaN canonical."""
    r = tl.where(r > 0x7F7F, 0x7F7F, r)
    r = tl.where(magnitude >= INFINITY, 0x7F80, r) | (bits >> 31 << 15)
    return tl.where(magnitude > INFINITY, 0x7FC0, r)


@triton.jit
def to_fp16_nearest(x):
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    # normal: move the exponent's bias and round the dropped 13 bits to nearest even
    normal = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    # subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the lowest bits
    small = bits_of(float_of(magnitude) + 0.5) - 0x3F000000
    r = tl.where(magnitude < 0x38800000, small, normal)
    r = tl.where(magnitude >= 0x477FF000, 0x7C00, r) | (bits >> 31 << 15)
    return tl.where(magnitude > INFINITY, 0x7E00, r)


@triton.jit
def to_fp16_saturated(x):
    r = to_fp16_nearest(x)
    over = ((r & 0x7FFF) == 0x7C00) & ((bits_of(x) & MAGNITUDE) < INFINITY)
    return tl.where(over, r - 1, r)


@triton.jit
def to_fp8(x):
    bits = bits_of(x)
    magnitude = bits & MAGNITUDE
    normal = (magnitude - 0x3C000000 + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    # subnormal: adding 2^14 leaves the rounded multiple of 2^-9 in the lowest bits
    small = bits_of(float_of(magnitude) + 16384.0) - 0x46800000
    r = tl.where(magnitude < 0x3C800000, small, normal)
    r = tl.where(magnitude >= 0x43E00000, 0x7E, r) | (bits >> 31 << 7)
    return tl.where(magnitude >= INFINITY, 0x7F, r)


@triton.jit
def to_code(x, TOP: tl.constexpr):
    x = tl.where(x > 0.0, x, 0.0)
    return tl.where(x < TOP, x, TOP).to(tl.int32)


@triton.jit
def entry(x, SIZE: tl.constexpr):
    """The position in a table of SIZE numbers that x stands for."""
    return tl.where(x < SIZE - 1, tl.where(x < 1, 0.0, x), SIZE - 1.0).to(tl.int32)


@triton.jit
def to_int32(x):
    x = tl.where(x == x, x, 0.0)
    x = tl.where(x < 2147483520.0, x, 2147483520.0)
    return tl.where(x > -2147483520.0, x, -2147483520.0).to(tl.int32)


@triton.jit
def power3(k):
    """3^k for k of 0 to 4."""
    small = tl.where(k == 0, 1, tl.where(k == 1, 3, 9))
    return tl.where(k < 3, small, tl.where(k == 3, 27, 81))


@triton.jit
def from_bf16(h):
    return float_of(h << 16)


@triton.jit
def from_fp16(h):
    # as fp32, the 15 bits are the value times 2^-112, subnormals included
    scaled = bits_of(float_of((h & 0x7FFF) << 13) * 5.192296858534828e33)
    special = (h & 0x7C00) == 0x7C00
    magnitude = tl.where(special, INFINITY | (h & 0x3FF) << 13, scaled)
    return float_of(magnitude | (h & 0x8000) << 16)


@triton.jit
def from_fp8(h):
    h = h.to(tl.uint32)
    low = h & 0x7F
    small = bits_of(low.to(tl.int32).to(tl.float32) * 0.001953125)
    magnitude = tl.where(low < 8, small, (low << 20) + 0x3C000000)
    return float_of(tl.where(low == 0x7F, NAN, magnitude) | (h & 0x80) << 24)


# random numbers: lang/rng.py ---------------------------------------------------------------------


@triton.jit
def halves(x):
    """The lower and the upper 32 bits."""
    x = x.to(tl.uint64, bitcast=True)
    return (x & 0xFFFFFFFF).to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def stream_key(key, number):
    """The words of a stream as one number, which is also the key of the origin of this number."""
    x = key.to(tl.uint64, bitcast=True) + tl.cast(number + 1, tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def weyl(index):
    """The Weyl sequence at an index. It is linear, so weyl(a + b) = weyl(a) + weyl(b)."""
    return index.to(tl.uint32) * 0x9E3779B1


@triton.jit
def drawn(at, high):
    """A random number in units of 2^-24; `at` is weyl(index + low)."""
    x = at ^ (at >> 16)
    x = (x ^ high) * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return (x >> 8).to(tl.int32).to(tl.float32)


@triton.jit
def uniform(at, high):
    """A random number in [0, 1)."""
    return drawn(at, high) * 5.9604644775390625e-08
