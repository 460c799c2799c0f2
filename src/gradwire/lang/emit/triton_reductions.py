"""Reductions and rotations of blocks, and reductions of rows, in Triton.

lang/semantics.py defines these functions; this file, prelude.h and rotation.h must give the same
bits. Only generated code and lang/gpu.py import it. Shapes as in triton_prelude.py; what the
functions are given already joins all tensors of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.lang.emit.triton_numbers import (
    INFINITY,
    NAN,
    SIGN,
    bits_of,
    float_of,
    from_key,
    int_of,
    key_of,
    negative,
    number,
)
from gradwire.lang.emit.triton_prelude import BEHIND, BLOCKS, COLUMNS, PARTIALS


@triton.jit
def extremes(least, most, unsigned):
    """(minimum, maximum) per block: +0 for either zero, NaN if any value is NaN.

    least, most, unsigned: [G, W], the least and the greatest bits as signed integers, and the
    greatest as unsigned ones. Negative floats are in reverse order: the least has the greatest bits
    unsigned, the greatest, if there are no others, the least signed.
    """
    least, most = tl.min(least, 1)[:, None], tl.max(most, 1)[:, None]
    unsigned = tl.max(unsigned, 1)[:, None]
    low = float_of(tl.where(unsigned >= SIGN, unsigned, bits_of(least))) + 0.0
    high = float_of(bits_of(tl.where(most >= 0, most, least))) + 0.0
    nan = (most > INFINITY) | (unsigned > 0xFF800000)
    return tl.where(nan, number(NAN), low), tl.where(nan, number(NAN), high)


@triton.jit
def count(ones):
    """The number of elements per block that satisfy a condition."""
    return tl.sum(ones, 1)[:, None].to(tl.float32)


@triton.jit
def tree_sum(x, GROUP: tl.constexpr, W: tl.constexpr, LOG: tl.constexpr):
    """[G, W] -> [G, 1]: adds the upper half to the lower until one is left; W = 2^LOG.

    A sum of two values does not depend on order, so each step is exact.
    """
    for s in tl.static_range(LOG):
        x = tl.sum(tl.reshape(x, GROUP, 2, W >> (s + 1)), 1)
    return tl.reshape(x, GROUP, 1) + 0.0


@triton.jit
def tree_sum_spread(x, GROUP: tl.constexpr, W: tl.constexpr, LOG: tl.constexpr):
    """`tree_sum` for a sum that elements depend on.

    Both halves get the result of a step: else each thread would hold all of the block, and every
    thread would compute every element that depends on it.
    """
    for s in tl.static_range(LOG):
        pairs = tl.reshape(x, GROUP, 1 << s, 2, W >> (s + 1))
        halves = tl.sum(pairs, 2)[:, :, None, :]
        x = tl.reshape(tl.broadcast_to(halves, GROUP, 1 << s, 2, W >> (s + 1)), GROUP, W)
    return float_of(bits_of(tl.max(int_of(x), 1)[:, None])) + 0.0


# rotations ---------------------------------------------------------------------------------------


@triton.jit
def hadamard(x, part, GROUP: tl.constexpr, W: tl.constexpr, LOG: tl.constexpr):
    """[G, W] -> [G, W]: sums and differences at distances below W = 2^LOG, within parts.

    part: the size of an element's part, or a number with the same highest bit. The parts are
    ordered by descending size, so the highest bit of i ^ m is the size of i's part, and the partner
    of i at any smaller distance is in the same part.
    """
    first = (tl.arange(0, 2) == 0)[None, None, :, None]
    for s in tl.static_range(LOG):
        bits = tl.reshape(bits_of(x), GROUP, W >> (s + 1), 2, 1 << s)
        # the partner, by wrapping integers; in 64 bits, since sums in Triton's interpreter do not
        # wrap
        both = tl.sum(bits, 2)[:, :, None, :].to(tl.uint64)
        other, pairs = float_of((both - bits.to(tl.uint64)).to(tl.uint32)), float_of(bits)
        mixed = tl.where(first, pairs + other, other - pairs)
        x = tl.where(part >= (2 << s), tl.reshape(mixed, GROUP, W), x)
    return x


@triton.jit
def scale_of(part):
    """1 / sqrt(size of a part), from a number with the same highest bit."""
    exponent = (bits_of(part.to(tl.float32)) >> 23).to(tl.int32) - 127
    odd = tl.where(exponent % 2 == 0, 1.0, 0.7071067690849304)
    return odd * ((127 - exponent // 2) << 23).to(tl.float32, bitcast=True)


@triton.jit
def sign(drawn):
    """A random sign, 1 or -1."""
    return tl.where(drawn < 8388608.0, 1.0, -1.0)


@triton.jit
def elements(x, i, mask, GROUP: tl.constexpr, W: tl.constexpr):
    """[G, all] in the natural order -> [G, W] of the elements `i`."""
    return tl.gather(x, tl.broadcast_to(tl.where(mask, i, 0), GROUP, W), 1)


# rows --------------------------------------------------------------------------------------------


@triton.jit
def result(row, index):
    """Where the 32 bits of a reduction of a row are: behind the table, where the host has put 0."""
    return (row + tl.load(row + BEHIND) + index).to(tl.pointer_type(tl.uint32))


@triton.jit
def join_extreme(row, x, here, INDEX: tl.constexpr, KIND: tl.constexpr):
    """Let numbers of blocks [G, 1] take part in extreme INDEX of their row: the greatest key so
    far; 0 is less than any. So no order matters."""
    key = tl.where(here, key_of(negative(x) if KIND == "min" else x), 0)
    tl.atomic_max(result(row, INDEX), tl.max(tl.max(key, 1), 0), sem="relaxed")


@triton.jit
def extreme_of(row, INDEX: tl.constexpr, KIND: tl.constexpr):
    """The extreme INDEX of a row: +0 for either zero, NaN if any number is NaN."""
    x = from_key(tl.load(result(row, INDEX)))
    x = negative(x) if KIND == "min" else x
    return tl.where(x == x, x + 0.0, number(NAN))


@triton.jit
def complete(table, workspace, index, done, R: tl.constexpr, LOG: tl.constexpr, C: tl.constexpr):
    """Sum up a row's partial results from `width` to width / R columns; R = 2^LOG.

    Programs (row, C columns, reduction from `index`). `done`: earlier passes. The last pass stores
    the row's result; another pass would store the same result.
    """
    row = table + tl.program_id(0).to(tl.int64) * COLUMNS
    blocks = tl.load(row + BLOCKS)
    width = blocks * 0 + 1
    while width < blocks:
        width *= 2
    for _ in range(done):
        width = tl.maximum(width // R, 1)
    columns = tl.maximum(width // R, 1)
    index += tl.program_id(2)
    at = workspace + tl.load(row + PARTIALS) + index * blocks
    c = (tl.program_id(1) * C + tl.arange(0, C))[:, None]
    r = tl.arange(0, R)[None, :]
    i = c + r * columns
    mask = (c < columns) & (i < tl.minimum(blocks, width))
    x = tree_sum(tl.load(at + i, mask=mask, other=0.0), C, R, LOG)
    tl.store(at + c, x, mask=c < tl.minimum(columns, blocks))
    ends = tl.where(columns == 1, tl.minimum(blocks, 1), 0)
    tl.store(result(row, index) + c, bits_of(x), mask=c < ends)
