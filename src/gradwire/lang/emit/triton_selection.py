"""Selections in Triton: keys, the k-th largest key, how many reach it.

This file has the passes between the sweeps of a codec that selects; triton_codes.py handles
entries. A sweep stores the key of every element. A radix select finds the k-th largest key, the
*cut*, byte by byte: four times, `histogram` counts the next byte of the keys that share the cut's
known prefix, and `pick` extends the prefix. `tally` then counts the keys above and equal to the cut
per block, and triton_counts.py computes prefix sums. After that every element can determine whether
it is selected and its entry number. Results do not depend on the order of programs, since all sums
are of integers.

Only generated code and lang/gpu.py import this file.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.lang.emit.triton_numbers import (
    INFINITY,
    MAGNITUDE,
    SIGN,
    bits_of,
    float_of,
    uniform,
    weyl,
)
from gradwire.lang.emit.triton_prelude import (
    BEFORE,
    CAPACITY,
    COLUMNS,
    KEYS,
    NUMEL,
    PARTIALS,
    STATE,
    TIED,
    find,
    place,
)

BINS = tl.constexpr(256)  # of a histogram of one byte of the keys
# Words of a row's state: the cut, the number of selected keys equal to it, the histogram.
CUT = tl.constexpr(0)
TAKEN = tl.constexpr(1)
HISTOGRAM = tl.constexpr(8)
SUMS = tl.constexpr(264)  # sums of chunks of blocks, which follow the state


# keys --------------------------------------------------------------------------------------------


@triton.jit
def as_int(word):
    return word.to(tl.int32, bitcast=True)


@triton.jit
def as_word(number):
    return number.to(tl.uint32, bitcast=True)


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
def begin_selection(row, words, block, RANKED: tl.constexpr):
    """Initialise a row's state for the passes after this sweep, in the first tile's program."""
    state = words + tl.load(row + STATE)
    if block == 0:
        if RANKED:
            tl.store(state + HISTOGRAM + tl.arange(0, BINS), tl.full((BINS,), 0, tl.int32))
        else:  # select the first elements whose key is 1
            tl.store(state + CUT, 1)
            tl.store(state + TAKEN, tl.load(row + CAPACITY).to(tl.int32))


@triton.jit
def sampled(row, element, low, high, EVERY: tl.constexpr):
    """(window, whether the element represents it) for elements numbered in their row."""
    window = element // EVERY
    u = uniform(weyl(window.to(tl.uint32) + low), high)
    at = window * EVERY + (u * (EVERY * 1.0)).to(tl.int32)
    return window, tl.minimum(at, tl.load(row + NUMEL) - 1) == element


# between the sweeps ------------------------------------------------------------------------------


@triton.jit
def blocks_of(row, BLOCK: tl.constexpr):
    return (tl.load(row + NUMEL) + BLOCK - 1) // BLOCK


@triton.jit(do_not_specialize=["n", "steps", "shift"])
def histogram(
    table, n, steps, words, shift,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Count byte `shift` // 8 of the keys of a tile whose higher bytes equal those of the cut.

    SIZE: a power of two, at least BLOCK * GROUP. EVERY: one key per this many values.
    """
    row = find(table, n, steps)
    block, held, m, _ = place(row, BLOCK, GROUP)
    state = words + tl.load(row + STATE)
    begin = block * BLOCK
    keys = (tl.load(row + NUMEL) + EVERY - 1) // EVERY
    i = tl.arange(0, SIZE)
    mask = (i < held * m) & (begin + i < keys)
    if begin < keys:
        key = as_word(tl.load(words + tl.load(row + KEYS) + begin + i, mask=mask, other=0))
        above = (key.to(tl.uint64) >> (shift + 8)) == as_word(tl.load(state + CUT)).to(tl.uint64)
        mask = mask & (above | (shift == 24))
        byte = tl.where(mask, as_int((key >> shift) & 0xFF), 0)
        bins = tl.arange(0, BINS)
        counts = tl.histogram(byte, BINS)
        counts = tl.where(bins == 0, counts - tl.sum((~mask).to(tl.int32), 0), counts)
        tl.atomic_add(state + HISTOGRAM + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["shift", "column", "index"])
def pick(
    table, words, workspace, shift, column, index,
    BLOCK: tl.constexpr, PARTIAL: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Programs (row): find the next byte of the k-th largest key, with k in the row's `column`.

    The last pass stores an order statistic as reduction `index` of the row.
    """
    row = table + tl.program_id(0).to(tl.int64) * COLUMNS
    state = words + tl.load(row + STATE)
    bins = tl.arange(0, BINS)
    counts, above = tl.load(state + HISTOGRAM + bins), as_word(tl.load(state + CUT))
    tl.store(state + HISTOGRAM + bins, tl.full((BINS,), 0, tl.int32))
    first = shift == 24
    k = tl.load(row + column).to(tl.int32)
    k = tl.where(first, k, tl.load(state + TAKEN))
    least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # keys with this byte or a larger one
    byte = tl.sum((least >= k).to(tl.int32), 0) - 1
    k -= tl.sum(tl.where(bins == byte + 1, least, 0), 0)
    key = tl.where(first, 0, above << 8) | as_word(byte)
    if SAMPLE:
        if shift == 0:
            at = workspace + tl.load(row + PARTIALS) + PARTIAL * blocks_of(row, BLOCK) + index
            tl.store(at, from_key(key), mask=tl.load(row + NUMEL) > 0)
    else:  # fewer than k elements can be selected: select all of them
        k = tl.where((shift == 0) & (key == 0), 0, k)
    tl.store(state + CUT, as_int(key))
    tl.store(state + TAKEN, k)


@triton.jit(do_not_specialize=["n", "steps"])
def tally(
    table, n, steps, words,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Count the keys per block that are above the cut, and those equal to it."""
    row = find(table, n, steps)
    block, held, m, _ = place(row, BLOCK, GROUP)
    state = words + tl.load(row + STATE)
    g, j = tl.arange(0, GROUP)[:, None], tl.arange(0, J)[None, :]
    mask = (g < held) & (j < m)
    at = words + tl.load(row + KEYS) + block * BLOCK
    key = as_word(tl.load(at + g * BLOCK + j, mask=mask, other=0))
    cut = as_word(tl.load(state + CUT))
    larger = tl.sum((mask & (key > cut)).to(tl.int32), 1)
    equal = tl.sum((mask & (key == cut)).to(tl.int32), 1)
    g = tl.arange(0, GROUP)
    tl.store(words + tl.load(row + BEFORE) + block + g, larger, mask=g < held)
    tl.store(words + tl.load(row + TIED) + block + g, equal, mask=g < held)
