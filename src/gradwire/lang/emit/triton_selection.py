"""Selections in Triton: keys, the candidates among them, the k-th largest key.

This file has what happens before the entries of a selection are known; triton_counts.py counts
them, triton_codes.py handles them. The k-th largest key is the *cut*; keys above it are selected,
and of those equal to it the first.

    picks       a sweep over few blocks stores some of their keys
    choose      from these, a *floor* that somewhat more than k keys should reach
    sift        a sweep stores the keys that reach the floor, the *candidates*, in a list of the
                row. If they are fewer than k, its last program lowers the floor to 1, and the next
                sweep sifts the row again; other rows are closed by then
    histogram   three times: counts the next digit of the candidates that share the known digits of
                the cut, which the previous counts have extended

A short row is sifted at once: the host has put 0 for its floor, which is taken for 1. So the floor
decides how much time a selection takes, but not what it selects. A key of 0 is that of an element
that may not be selected. Candidates of a block are in order, and next to each other in the list;
the order of blocks there depends on the order of programs. Nothing that is stored in a payload
does: all sums are of integers.

Only generated code, triton_counts.py, triton_codes.py and lang/gpu.py import this file.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.lang.emit.triton_numbers import SIGN, bits_of, from_key, uniform, weyl
from gradwire.lang.emit.triton_prelude import (
    BLOCKS,
    CAPACITY,
    CHUNK,
    CLOSED,
    COLUMNS,
    FLOOR,
    FOUND,
    KEYS,
    NUMEL,
    STATE,
    TIED,
    TILES,
    find,
)
from gradwire.lang.emit.triton_reductions import result

DIGIT = tl.constexpr(11)  # bits that are counted together: a key's 32, and a zero, are three digits
BINS = tl.constexpr(2048)
# Words of a row's state
CUT = tl.constexpr(0)
TAKEN = tl.constexpr(1)  # the number of selected keys equal to the cut
KNOWN = tl.constexpr(2)  # before each of three passes: the known digits of the cut
RANK = tl.constexpr(5)  # and its rank among the keys that share them
HISTOGRAM = tl.constexpr(8)  # of each pass
SUMS = tl.constexpr(8 + 3 * 2048)  # sums of chunks of blocks

CLEARED = tl.constexpr(1024)  # words that are zeroed at once
SAMPLED = tl.constexpr(1024)  # blocks of a row's sample, at most
PICKED = tl.constexpr(16)  # keys that are taken from each, at most
PRECISION = tl.constexpr(16)  # bits of the floor


# keys --------------------------------------------------------------------------------------------


@triton.jit
def positions_of(row, words):
    """The positions in their blocks of the candidates, behind the keys."""
    return (words + tl.load(row + KEYS) + tl.load(row + NUMEL)).to(tl.pointer_type(tl.uint16))


# the floor ---------------------------------------------------------------------------------------


@triton.jit
def spacing(row):
    """log2 of how many blocks make a window, of which one is sampled."""
    some = ((tl.load(row + BLOCKS) - 1) // SAMPLED).to(tl.float32)
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
def has_picks(row, block, held):
    """Whether some of these blocks are sampled: in the window of the first, or in the next."""
    spaced = spacing(row)
    one, next = sampled_block(block >> spaced, spaced), sampled_block((block >> spaced) + 1, spaced)
    return ((one >= block) & (one < block + held)) | (next < block + held)


@triton.jit
def picks(row, block, i, BLOCK: tl.constexpr):
    """(place in the sample, whether it is picked) for elements `i` of blocks."""
    PICK: tl.constexpr = (BLOCK + PICKED - 1) // PICKED
    PICKS: tl.constexpr = (BLOCK + PICK - 1) // PICK
    spaced = spacing(row)
    window = block >> spaced
    picked = (block == sampled_block(window, spaced)) & (i % PICK == first_pick(block, BLOCK))
    return window * PICKS + i // PICK, picked


@triton.jit
def floor_of(row, words, BLOCK: tl.constexpr):
    """A key that k of a row's keys should reach, with a margin of four standard deviations."""
    PICK: tl.constexpr = (BLOCK + PICKED - 1) // PICKED
    PICKS: tl.constexpr = (BLOCK + PICK - 1) // PICK
    at, numel = tl.arange(0, SAMPLED * PICKED), tl.load(row + NUMEL)
    block = sampled_block((at // PICKS).to(tl.int64), spacing(row))
    i = at % PICKS * PICK + first_pick(block, BLOCK)
    mask = (i < BLOCK) & (block * BLOCK + i < numel)
    key = bits_of(tl.load(words + tl.load(row + KEYS) + at, mask=mask, other=0))
    share = tl.load(row + CAPACITY).to(tl.float32) / numel.to(tl.float32)
    expected = share * tl.sum(mask.to(tl.int32), 0).to(tl.float32)
    rank = (expected + 4.0 * tl.sqrt(expected) + 4.0).to(tl.int32)
    floor = tl.full((), 0, tl.uint32)
    for bit in range(PRECISION):
        trial = floor | (tl.full((), SIGN, tl.uint32) >> bit)
        floor = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= rank, trial, floor)
    return tl.where(floor == 0, 1, floor)


@triton.jit
def choose(table, words, BLOCK: tl.constexpr):
    """Programs (row): the floor, from the sample."""
    row = table + tl.program_id(0).to(tl.int64) * COLUMNS
    tl.store(row + FLOOR, floor_of(row, words, BLOCK).to(tl.int64))


# candidates --------------------------------------------------------------------------------------


@triton.jit
def reserve(row, words, block, held, g, here, many):
    """Room for candidates, `many` [G, 1] of every block: the place of each block's first.

    Then a count of the candidates found so far and, from 2^32 on, of the blocks. So the last
    program knows both of the whole row, in whatever order programs run.
    """
    own = tl.sum(tl.sum(many, 1), 0) + (tl.full((), 1, tl.int64) << 32) * held
    earlier = tl.atomic_add(row + FOUND, own, sem="relaxed")
    first = (earlier & 0xFFFFFFFF).to(tl.int32) + tl.cumsum(many, 0) - many
    segments = words + tl.load(row + TIED) + block + g
    blocks = tl.load(row + BLOCKS)
    tl.store(segments + blocks, first, mask=here)
    tl.store(segments + 2 * blocks, many, mask=here)
    return first, earlier + own


@triton.jit
def close(row, words, block, counted):
    """The last program of a row closes it, or lets the next sweep sift it again, without a floor.

    The first one zeros what is counted next.
    """
    blocks = tl.load(row + BLOCKS)
    if counted >> 32 == blocks:
        found = counted & 0xFFFFFFFF
        again = (found < tl.load(row + CAPACITY)) & (tl.load(row + FLOOR) > 1)
        tl.store(row + FOUND, tl.where(again, 0, found))
        tl.store(row + FLOOR, 1, mask=again)
        tl.store(row + CLOSED, 1, mask=~again)
    if block == 0:
        clear(words + tl.load(row + STATE), 2 * (blocks // CHUNK + 1) + SUMS)


@triton.jit
def clear(state, end):
    """Zero the histograms and what follows, up to word `end`."""
    for first in range(HISTOGRAM, end, CLEARED):
        i = first + tl.arange(0, CLEARED)
        tl.store(state + i, (i * 0).to(tl.int32), mask=i < end)


@triton.jit
def extend(state, number, k):
    """(the first `number` digits of the k-th largest key, its rank among the keys with these)."""
    known, rank = tl.full((), 0, tl.uint64), k.to(tl.int32)
    if number > 0:
        bins = tl.arange(0, BINS)
        counts = tl.load(state + HISTOGRAM + (number - 1) * BINS + bins)
        known = tl.load(state + KNOWN + number - 1).to(tl.uint64)
        rank = tl.load(state + RANK + number - 1)
        least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # with this digit or a larger one
        digit = tl.maximum(tl.sum((least >= rank).to(tl.int32), 0) - 1, 0)  # 0: fewer keys than k
        rank -= tl.sum(tl.where(bins == digit + 1, least, 0), 0)
        known = (known << DIGIT) | digit.to(tl.uint64)
    return known, rank


@triton.jit
def largest(state, k):
    """(the k-th largest key, its rank among the keys equal to it)."""
    known, rank = extend(state, 3, k)
    return (known >> 1).to(tl.uint32), rank


@triton.jit(do_not_specialize=["n", "steps", "number", "column"])
def histogram(
    table, n, steps, words, number, column,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Count digit `number`, from the highest, of candidates whose higher digits are the cut's.

    k is in the row's `column`. A program has SIZE of them, a power of two, at least BLOCK * GROUP.
    EVERY: the keys are those of an order statistic, one per this many values; 0: candidates.
    """
    row = find(table, n, steps)
    state = words + tl.load(row + STATE)
    part = (tl.program_id(0) - tl.load(row + TILES)).to(tl.int32)
    if EVERY > 0:
        keys = ((tl.load(row + NUMEL) + EVERY - 1) // EVERY).to(tl.int32)
    else:
        keys = tl.load(row + FOUND).to(tl.int32)
    if (part == 0) | (part * SIZE < keys):
        known, rank = extend(state, number, tl.load(row + column))
        if part == 0:
            tl.store(state + KNOWN + number, known.to(tl.int32))
            tl.store(state + RANK + number, rank)
        i = part * SIZE + tl.arange(0, SIZE)
        key = bits_of(tl.load(words + tl.load(row + KEYS) + i, mask=i < keys, other=0))
        digits = key.to(tl.uint64) << 1 >> (DIGIT * (2 - number))  # up to the one that is counted
        mask = (i < keys) & (digits >> DIGIT == known)
        bins = tl.arange(0, BINS)
        counts = tl.histogram(tl.where(mask, (digits % BINS).to(tl.int32), 0), BINS)
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
def statistic(table, words, column, index):
    """Programs (row): store the k-th largest of a sample as reduction `index` of the row."""
    row = table + tl.program_id(0).to(tl.int64) * COLUMNS
    key, _ = largest(words + tl.load(row + STATE), tl.load(row + column))
    tl.store(result(row, index), bits_of(from_key(key)))
