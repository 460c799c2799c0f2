"""Selections in Triton: keys, the candidates among them, the k-th largest key.

This file has what happens before the entries of a selection are known; triton_counts.py counts
them, triton_codes.py handles them. The k-th largest key is the *cut*; keys above it are selected,
and of those equal to it the first.

    sample      a sweep over few blocks stores some of their keys
    begin       from these, a *floor* that somewhat more than k keys should reach
    sift        a sweep stores the keys that reach the floor, the *candidates*, in a list of the row
    check       if they are fewer than k, the floor becomes 1, and such rows are sifted again
    histogram   four times: counts the next byte of the candidates that share the known bytes of the
                cut, which the previous counts have extended

So the floor decides how much time a selection takes, but not what it selects. A key of 0 is that of
an element that may not be selected. Candidates of a block are in order, and next to each other in
the list; the order of blocks there depends on the order of programs. Nothing that is stored in a
payload does: all sums are of integers.

Only generated code, triton_counts.py, triton_codes.py and lang/gpu.py import this file.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.lang.emit.triton_numbers import SIGN, bits_of, from_key, uniform, weyl
from gradwire.lang.emit.triton_prelude import (
    CAPACITY,
    COLUMNS,
    KEYS,
    NUMEL,
    PARTIALS,
    STATE,
    TIED,
    TILES,
    find,
)

BINS = tl.constexpr(256)  # of a histogram of one byte of the keys
# Words of a row's state
CUT = tl.constexpr(0)
TAKEN = tl.constexpr(1)  # the number of selected keys equal to the cut
FLOOR = tl.constexpr(2)
FOUND = tl.constexpr(3)  # the number of candidates
OPEN = tl.constexpr(4)  # whether a sweep is to look for candidates
KNOWN = tl.constexpr(8)  # before each of four passes: the known bytes of the cut
RANK = tl.constexpr(12)  # and its rank among the keys that share them
HISTOGRAM = tl.constexpr(16)  # of each pass
SUMS = tl.constexpr(1040)  # sums of chunks of blocks

SAMPLED = tl.constexpr(1024)  # blocks of a row's sample, at most
PICKED = tl.constexpr(16)  # keys that are taken from each, at most
PRECISION = tl.constexpr(16)  # bits of the floor


# keys --------------------------------------------------------------------------------------------


@triton.jit
def as_int(word):
    return word.to(tl.int32, bitcast=True)


@triton.jit
def as_word(number):
    return number.to(tl.uint32, bitcast=True)


@triton.jit
def blocks_of(row, BLOCK: tl.constexpr):
    return (tl.load(row + NUMEL) + BLOCK - 1) // BLOCK


@triton.jit
def positions_of(row, words):
    """The positions in their blocks of the candidates, behind the keys."""
    return (words + tl.load(row + KEYS) + tl.load(row + NUMEL)).to(tl.pointer_type(tl.uint16))


# the floor ---------------------------------------------------------------------------------------


@triton.jit
def spacing(row, BLOCK: tl.constexpr):
    """log2 of how many blocks make a window, of which one is sampled."""
    some = ((blocks_of(row, BLOCK) - 1) // SAMPLED).to(tl.float32)
    return tl.maximum((bits_of(some) >> 23).to(tl.int32) - 126, 0)


@triton.jit
def sampled_block(window, spaced):
    """Differs between windows, since the shapes of rows are often powers of two."""
    return (window << spaced) | ((window * 37) & ((1 << spaced) - 1))


@triton.jit
def first_pick(block, BLOCK: tl.constexpr):
    """Differs between blocks, lest the sample be of a few columns of a matrix."""
    PICK: tl.constexpr = (BLOCK + PICKED - 1) // PICKED
    return (block.to(tl.int32) & 0xFFFF) * 37 % PICK


@triton.jit
def has_picks(row, block, held, BLOCK: tl.constexpr):
    """Whether some of these blocks are sampled: in the window of the first, or in the next."""
    spaced = spacing(row, BLOCK)
    one, next = sampled_block(block >> spaced, spaced), sampled_block((block >> spaced) + 1, spaced)
    return ((one >= block) & (one < block + held)) | (next < block + held)


@triton.jit
def picks(row, block, i, BLOCK: tl.constexpr):
    """(place in the sample, whether it is picked) for elements `i` of blocks."""
    PICK: tl.constexpr = (BLOCK + PICKED - 1) // PICKED
    PICKS: tl.constexpr = (BLOCK + PICK - 1) // PICK
    spaced = spacing(row, BLOCK)
    window = block >> spaced
    picked = (block == sampled_block(window, spaced)) & (i % PICK == first_pick(block, BLOCK))
    return window * PICKS + i // PICK, picked


@triton.jit
def floor_of(row, words, BLOCK: tl.constexpr):
    """A key that k of a row's keys should reach, with a margin of four standard deviations."""
    PICK: tl.constexpr = (BLOCK + PICKED - 1) // PICKED
    PICKS: tl.constexpr = (BLOCK + PICK - 1) // PICK
    at, numel = tl.arange(0, SAMPLED * PICKED), tl.load(row + NUMEL)
    block = sampled_block((at // PICKS).to(tl.int64), spacing(row, BLOCK))
    i = at % PICKS * PICK + first_pick(block, BLOCK)
    mask = (i < BLOCK) & (block * BLOCK + i < numel)
    key = as_word(tl.load(words + tl.load(row + KEYS) + at, mask=mask, other=0))
    share = tl.load(row + CAPACITY).to(tl.float32) / numel.to(tl.float32)
    expected = share * tl.sum(mask.to(tl.int32), 0).to(tl.float32)
    rank = (expected + 4.0 * tl.sqrt(expected) + 4.0).to(tl.int32)
    floor = tl.full((), 0, tl.uint32)
    for bit in range(PRECISION):
        trial = floor | (tl.full((), SIGN, tl.uint32) >> bit)
        floor = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= rank, trial, floor)
    return tl.where(floor == 0, 1, floor)


@triton.jit
def begin(
    table, words,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, RANKED: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Programs (row): the floor, from a SAMPLE or 1, and the state before any candidate is found.

    Not RANKED: all keys are 1 or 0, and the first are selected.
    """
    row = table + tl.program_id(0).to(tl.int64) * COLUMNS
    state = words + tl.load(row + STATE)
    clear(state, 2 * (blocks_of(row, BLOCK) // CHUNK + 1) + SUMS)
    floor = tl.full((), 1, tl.uint32)
    if SAMPLE:
        floor = floor_of(row, words, BLOCK)
    tl.store(state + FLOOR, as_int(floor))
    tl.store(state + FOUND, 0)
    tl.store(state + OPEN, 1)
    if not RANKED:
        tl.store(state + CUT, 1)
        tl.store(state + TAKEN, tl.load(row + CAPACITY).to(tl.int32))


@triton.jit
def check(table, words):
    """Programs (row): whether to look for candidates again."""
    row = table + tl.program_id(0).to(tl.int64) * COLUMNS
    state = words + tl.load(row + STATE)
    few = tl.load(state + FOUND) < tl.load(row + CAPACITY)
    few = few & (as_word(tl.load(state + FLOOR)) > 1)
    tl.store(state + OPEN, few.to(tl.int32))
    tl.store(state + FLOOR, 1, mask=few)
    tl.store(state + FOUND, 0, mask=few)


# candidates --------------------------------------------------------------------------------------


@triton.jit
def reserve(row, words, block, g, here, many, BLOCK: tl.constexpr):
    """Room for candidates, `many` [G, 1] of every block: the place of each block's first."""
    found = words + tl.load(row + STATE) + FOUND
    first = tl.atomic_add(found, tl.sum(tl.sum(many, 1), 0), sem="relaxed")
    first += tl.cumsum(many, 0) - many
    segments = words + tl.load(row + TIED) + block + g
    blocks = blocks_of(row, BLOCK)
    tl.store(segments + blocks, first, mask=here)
    tl.store(segments + 2 * blocks, many, mask=here)
    return first


@triton.jit
def clear(state, end):
    """Zero the histograms and what follows, up to word `end`."""
    for first in range(HISTOGRAM, end, 4 * BINS):
        i = first + tl.arange(0, 4 * BINS)
        tl.store(state + i, (i * 0).to(tl.int32), mask=i < end)


@triton.jit
def extend(state, number, k):
    """(the first `number` bytes of the k-th largest key, its rank among the keys with these)."""
    known, rank = tl.full((), 0, tl.uint32), k.to(tl.int32)
    if number > 0:
        bins = tl.arange(0, BINS)
        counts = tl.load(state + HISTOGRAM + (number - 1) * BINS + bins)
        known = as_word(tl.load(state + KNOWN + number - 1))
        rank = tl.load(state + RANK + number - 1)
        least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # with this byte or a larger one
        byte = tl.maximum(tl.sum((least >= rank).to(tl.int32), 0) - 1, 0)  # 0: fewer keys than k
        rank -= tl.sum(tl.where(bins == byte + 1, least, 0), 0)
        known = (known << 8) | as_word(byte)
    return known, rank


@triton.jit(do_not_specialize=["n", "steps", "number", "column"])
def histogram(
    table, n, steps, words, number, column,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Count byte `number`, from the highest, of the candidates whose higher bytes are the cut's.

    k is in the row's `column`. A program has SIZE of them, a power of two, at least BLOCK * GROUP.
    EVERY: the keys are those of an order statistic, one per this many values; 0: candidates.
    """
    row = find(table, n, steps)
    state = words + tl.load(row + STATE)
    part = (tl.program_id(0) - tl.load(row + TILES)).to(tl.int32)
    if EVERY > 0:
        keys = ((tl.load(row + NUMEL) + EVERY - 1) // EVERY).to(tl.int32)
    else:
        keys = tl.load(state + FOUND)
    if (part == 0) | (part * SIZE < keys):
        known, rank = extend(state, number, tl.load(row + column))
        if part == 0:
            tl.store(state + KNOWN + number, as_int(known))
            tl.store(state + RANK + number, rank)
        i = part * SIZE + tl.arange(0, SIZE)
        key = as_word(tl.load(words + tl.load(row + KEYS) + i, mask=i < keys, other=0))
        shift = 24 - 8 * number
        mask = (i < keys) & ((key.to(tl.uint64) >> (shift + 8)) == known.to(tl.uint64))
        byte = tl.where(mask, as_int((key >> shift) & 0xFF), 0)
        bins = tl.arange(0, BINS)
        counts = tl.histogram(byte, BINS)
        counts = tl.where(bins == 0, counts - tl.sum((~mask).to(tl.int32), 0), counts)
        at = state + HISTOGRAM + number * BINS + bins
        tl.atomic_add(at, counts, mask=counts > 0, sem="relaxed")


# order statistics --------------------------------------------------------------------------------


@triton.jit
def sampled(row, element, low, high, EVERY: tl.constexpr):
    """(window, whether the element represents it) for elements numbered in their row."""
    window = element // EVERY
    u = uniform(weyl(window.to(tl.uint32) + low), high)
    at = window * EVERY + (u * (EVERY * 1.0)).to(tl.int32)
    return window, tl.minimum(at, tl.load(row + NUMEL) - 1) == element


@triton.jit(do_not_specialize=["column", "index"])
def statistic(table, words, workspace, column, index, BLOCK: tl.constexpr, PARTIAL: tl.constexpr):
    """Programs (row): store the k-th largest of a sample as reduction `index` of the row."""
    row = table + tl.program_id(0).to(tl.int64) * COLUMNS
    state, blocks = words + tl.load(row + STATE), blocks_of(row, BLOCK)
    key, _ = extend(state, 4, tl.load(row + column))
    at = workspace + tl.load(row + PARTIALS) + PARTIAL * blocks + index
    tl.store(at, from_key(key), mask=blocks > 0)
