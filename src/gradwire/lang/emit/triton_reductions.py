"""Reductions and rotations of blocks, and reductions of rows, in Triton.

lang/semantics.py defines these functions; this file, prelude.h and rotation.h must give the same
bits. Only generated code and lang/gpu.py import it. Shapes as in triton_prelude.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.lang.emit.triton_numbers import (
    INFINITY,
    LEAST,
    MAGNITUDE,
    MOST,
    NAN,
    bits_of,
    float_of,
    number,
)
from gradwire.lang.emit.triton_prelude import COLUMNS, NUMEL, PARTIALS


@triton.jit
def ordered(x):
    """Integers in the order of the floats, with NaN at the ends."""
    i = x.to(tl.int32, bitcast=True)
    return i ^ ((i >> 31) & MAGNITUDE)


@triton.jit
def extreme(chosen, low, high):
    """The float of an ordered integer: +0 for either zero, NaN if any value was NaN."""
    x = (chosen ^ ((chosen >> 31) & MAGNITUDE)).to(tl.float32, bitcast=True) + 0.0
    return tl.where((high > INFINITY) | (low < -0x7F800001), number(NAN), x)


@triton.jit
def lowest(o, mask):
    """[K, G, J] of ordered integers -> [1, G, 1]."""
    return tl.min(tl.min(tl.where(mask, o, MOST), 0), 1)[None, :, None]


@triton.jit
def highest(o, mask):
    """[K, G, J] of ordered integers -> [1, G, 1]."""
    return tl.max(tl.max(tl.where(mask, o, LEAST), 0), 1)[None, :, None]


@triton.jit
def count(condition, mask):
    """The number of elements per block that satisfy the condition: [K, G, J] -> [1, G, 1]."""
    return tl.sum(tl.sum((condition & mask).to(tl.int32), 0), 1)[None, :, None].to(tl.float32)


@triton.jit
def tree_sum(x, mask, GROUP: tl.constexpr, J: tl.constexpr, LOG: tl.constexpr):
    """[1, G, J] -> [1, G, 1]: adds the upper half to the lower until one is left; J = 2^LOG.

    A sum of two values does not depend on order, so each step is exact. Both halves get the result:
    a shrinking tensor would be replicated over the threads, and so would everything that uses it.
    """
    x = tl.reshape(tl.where(mask, x, 0.0), GROUP, J)
    for s in tl.static_range(LOG):
        pairs = tl.reshape(x, GROUP, 1 << s, 2, J >> (s + 1))
        halves = tl.sum(pairs, 2)[:, :, None, :]
        x = tl.reshape(tl.broadcast_to(halves, GROUP, 1 << s, 2, J >> (s + 1)), GROUP, J)
    same = ordered(tl.reshape(x, 1, GROUP, J))
    low, high = tl.min(same, 2, keep_dims=True), tl.max(same, 2, keep_dims=True)
    return extreme(high, low, high)


# rotations ---------------------------------------------------------------------------------------


@triton.jit
def hadamard(x, m, GROUP: tl.constexpr, J: tl.constexpr, LOG: tl.constexpr):
    """[1, G, J] -> [1, G, J]: a normalised transform of each power of two in m.

    The parts are ordered by descending size, so the highest bit of i ^ m is the size of i's part,
    and the partner of i at any smaller distance is in the same part.
    """
    x = tl.reshape(x, GROUP, J)
    part = tl.arange(0, J)[None, :] ^ m
    first = (tl.arange(0, 2) == 0)[None, None, :, None]
    for s in tl.static_range(LOG):
        bits = tl.reshape(bits_of(x), GROUP, J >> (s + 1), 2, 1 << s)
        # the partner, by wrapping integers; in 64 bits, since sums in Triton's interpreter do not
        # wrap
        both = tl.sum(bits, 2)[:, :, None, :].to(tl.uint64)
        other, pairs = float_of((both - bits.to(tl.uint64)).to(tl.uint32)), float_of(bits)
        mixed = tl.where(first, pairs + other, other - pairs)
        x = tl.where(part >= (2 << s), tl.reshape(mixed, GROUP, J), x)
    exponent = (bits_of(part.to(tl.float32)) >> 23).to(tl.int32) - 127
    odd = tl.where(exponent % 2 == 0, 1.0, 0.7071067690849304)
    scale = odd * ((127 - exponent // 2) << 23).to(tl.float32, bitcast=True)
    return tl.reshape(x * scale, 1, GROUP, J)


@triton.jit
def sign(u):
    """A random sign, 1 or -1."""
    return tl.where(u < 0.5, 1.0, -1.0)


@triton.jit
def in_view(
    x, i, mask, FULL: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, K: tl.constexpr, J: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """[1, G, ALL] in the natural order -> [K, G, J] of the elements `i`."""
    if FULL and K * J == BLOCK:
        y = tl.reshape(x, GROUP, K, J)
    else:
        at = tl.permute(tl.broadcast_to(tl.where(mask, i, 0), K, GROUP, J), 1, 0, 2)
        y = tl.gather(tl.reshape(x, GROUP, ALL), tl.reshape(at, GROUP, K * J), 1)
        y = tl.reshape(y, GROUP, K, J)
    return tl.permute(y, 1, 0, 2)


@triton.jit
def complete(
    table, workspace, index, done,
    BLOCK: tl.constexpr, PARTIAL: tl.constexpr, KIND: tl.constexpr,
    R: tl.constexpr, LOG: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Reduce a row's partial results from `width` to width / R columns; R = 2^LOG.

    Programs (row, C columns, reduction from `index`). `done`: earlier passes. The last pass stores
    the row's result behind its partial results; another pass would store the same result.
    """
    row = table + tl.program_id(0).to(tl.int64) * COLUMNS
    blocks = (tl.load(row + NUMEL) + BLOCK - 1) // BLOCK
    width = blocks * 0 + 1
    while width < blocks:
        width *= 2
    for _ in range(done):
        width = tl.maximum(width // R, 1)
    columns = tl.maximum(width // R, 1)
    partials = workspace + tl.load(row + PARTIALS)
    index += tl.program_id(2)
    at = partials + index * blocks
    c = (tl.program_id(1) * C + tl.arange(0, C))[None, :]
    r = tl.arange(0, R)[:, None]
    i = c + r * columns
    mask = (c < columns) & (i < tl.minimum(blocks, width))
    if KIND == "sum":
        x = tl.load(at + i, mask=mask, other=0.0)
        for s in tl.static_range(LOG):
            x = tl.sum(tl.reshape(x, 2, R >> (s + 1), C), 0)
        x = tl.reshape(x, 1, C) + 0.0
    else:
        o = ordered(tl.load(at + i, mask=mask, other=0.0))
        low = tl.min(tl.where(mask, o, MOST), 0)[None, :]
        high = tl.max(tl.where(mask, o, LEAST), 0)[None, :]
        x = extreme(low if KIND == "min" else high, low, high)
    tl.store(at + c, x, mask=c < tl.minimum(columns, blocks))
    ends = tl.where(columns == 1, tl.minimum(blocks, 1), 0)
    tl.store(partials + PARTIAL * blocks + index + c, x, mask=c < ends)
