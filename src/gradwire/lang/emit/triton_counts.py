"""Counts of blocks and their prefix sums, in Triton: the entries or kept blocks before every block.

A program has a chunk of the blocks. One launch adds up every chunk; in the next, every program adds
up the sums of the chunks before its own, so none reads the counts of a whole row. If no row has
more than one chunk, the first launch is omitted. Behind the last block comes one place more, for
the sum of all.

`tally` counts the keys of a selection, and adds up its chunks; the counts of received payloads are
in these.

Only lang/gpu.py imports this file.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.lang.emit.triton_numbers import bits_of, int_of
from gradwire.lang.emit.triton_prelude import (
    BEFORE,
    BLOCKS,
    CAPACITY,
    CHUNK,
    COLUMNS,
    COUNTED,
    KEYS,
    PAYLOAD,
    SOURCES,
    STATE,
    TIED,
    fail,
    load8,
    load16,
)
from gradwire.lang.emit.triton_selection import CUT, SUMS, TAKEN, largest


@triton.jit
def chunk_of(table, chunks, SIZE: tl.constexpr):
    """(row, its number of blocks, this program's chunk, its places)."""
    row = table + (tl.program_id(0) // chunks).to(tl.int64) * COLUMNS
    chunk = tl.program_id(0) % chunks
    return row, tl.load(row + BLOCKS).to(tl.int32), chunk, chunk * SIZE + tl.arange(0, SIZE)


@triton.jit
def sums_of(row, words, number, blocks):
    """The sums of the chunks, of the counts with this number."""
    return words + tl.load(row + STATE) + SUMS + number * (blocks // CHUNK + 1)


@triton.jit
def sum_before(sums, chunk, blocks, own, SINGLE: tl.constexpr):
    """(sum of the chunks before this one, sum of all); `own`: this chunk, if it is the only one."""
    before, total = own.to(tl.int64) * 0, own.to(tl.int64)
    if not SINGLE:
        total, i = before, tl.arange(0, CHUNK)
        for begin in range(0, blocks // CHUNK + 1, CHUNK):
            mask = begin + i <= blocks // CHUNK
            each = tl.load(sums + begin + i, mask=mask, other=0).to(tl.int64)
            before += tl.sum(tl.where(begin + i < chunk, each, 0), 0)
            total += tl.sum(each, 0)
    return before, total


@triton.jit(do_not_specialize=["parts"])
def tally(table, words, parts, PART: tl.constexpr, PIECE: tl.constexpr, RANKED: tl.constexpr):
    """Programs (PART blocks of a row's chunk): count the candidates per block above the cut, and
    equal to it, and add both to the sums of the chunk.

    PIECE: candidates of a block that are read at once. Not RANKED: all keys are 1 or 0, and the
    first are selected.
    """
    row, blocks, part, b = chunk_of(table, parts, PART)
    state, keys = words + tl.load(row + STATE), words + tl.load(row + KEYS)
    cut, taken = tl.full((), 1, tl.uint32), tl.load(row + CAPACITY).to(tl.int32)
    if RANKED:
        cut, taken = largest(state, tl.load(row + CAPACITY))
    if part == 0:  # a cut of 0: there are fewer than k, and all are selected
        tl.store(state + CUT, int_of(cut))
        tl.store(state + TAKEN, tl.where(cut == 0, 0, taken))
    tied = words + tl.load(row + TIED)
    first = tl.load(tied + blocks + b, mask=b < blocks, other=0)
    many = tl.load(tied + 2 * blocks + b, mask=b < blocks, other=0)
    larger, equal, e = b * 0, b * 0, tl.arange(0, PIECE)[None, :]
    for begin in range(0, tl.max(many, 0), PIECE):
        mask = begin + e < many[:, None]
        key = bits_of(tl.load(keys + first[:, None] + begin + e, mask=mask, other=0))
        larger += tl.sum((mask & (key > cut)).to(tl.int32), 1)
        equal += tl.sum((mask & (key == cut)).to(tl.int32), 1)
    tl.store(words + tl.load(row + BEFORE) + b, larger, mask=b < blocks)
    tl.store(tied + b, equal, mask=b < blocks)
    sums, has = sums_of(row, words, 0, blocks) + part * PART // CHUNK, part * PART < blocks
    tl.atomic_add(sums, tl.sum(larger, 0), mask=has, sem="relaxed")
    tl.atomic_add(sums + blocks // CHUNK + 1, tl.sum(equal, 0), mask=has, sem="relaxed")


@triton.jit(do_not_specialize=["chunks"])
def scan(table, words, chunks, SINGLE: tl.constexpr):
    """Programs (chunk of a row): from counts per block to the entries and ties before each block.

    The first ties are taken: of those before a block, as many as are taken at all.
    """
    row, blocks, chunk, i = chunk_of(table, chunks, CHUNK)
    before, tied = words + tl.load(row + BEFORE), words + tl.load(row + TIED)
    taken = tl.load(words + tl.load(row + STATE) + TAKEN)
    larger = tl.load(before + i, mask=i < blocks, other=0)
    equal = tl.load(tied + i, mask=i < blocks, other=0)
    sums = sums_of(row, words, 0, blocks)
    entries, _ = sum_before(sums, chunk, blocks, tl.sum(larger, 0), SINGLE)
    sums = sums_of(row, words, 1, blocks)
    ties, _ = sum_before(sums, chunk, blocks, tl.sum(equal, 0), SINGLE)
    ties = ties.to(tl.int32) + tl.cumsum(equal, 0) - equal
    entries = entries.to(tl.int32) + tl.cumsum(larger, 0) - larger + tl.minimum(ties, taken)
    tl.store(tied + i, ties, mask=i < blocks)
    tl.store(before + i, entries, mask=i <= blocks)


@triton.jit
def counts_of(row, number, stride, i, mask, FLAGS: tl.constexpr):
    """Entries or kept blocks of payload `number`: the own one is 0, the others are peers'."""
    payload = tl.load(row + PAYLOAD)
    if number > 0:
        payload = tl.load(row + SOURCES) + (number - 1).to(tl.int64) * stride
    payload += tl.load(row + COUNTED)
    if FLAGS:
        counts = (load8(payload, i, mask, 0) != 0).to(tl.int32)
    else:
        counts = load16(payload, i, mask, 0).to(tl.int32)
    return counts


@triton.jit(do_not_specialize=["stride", "first", "chunks"])
def sum_counts(table, words, stride, first, chunks, FLAGS: tl.constexpr):
    """Programs (chunk of a row, payload from `first`): add up its entries or kept blocks."""
    row, blocks, chunk, i = chunk_of(table, chunks, CHUNK)
    number = first + tl.program_id(1)
    total = tl.sum(counts_of(row, number, stride, i, i < blocks, FLAGS), 0)
    sums = sums_of(row, words, number, blocks)
    tl.store(sums + chunk, total, mask=chunk * CHUNK <= blocks)


@triton.jit(do_not_specialize=["stride", "first", "chunks"])
def survey(table, words, failed, stride, first, chunks, FLAGS: tl.constexpr, SINGLE: tl.constexpr):
    """Programs (chunk of a row, payload from `first`): the entries or kept blocks before blocks.

    A payload with too many entries is treated as empty.
    """
    row, blocks, chunk, i = chunk_of(table, chunks, CHUNK)
    number = first + tl.program_id(1)
    counts = counts_of(row, number, stride, i, i < blocks, FLAGS)
    sums = sums_of(row, words, number, blocks)
    earlier, total = sum_before(sums, chunk, blocks, tl.sum(counts, 0), SINGLE)
    excess = total > tl.load(row + CAPACITY)
    fail(failed, row, (i == 0) & excess)
    at = tl.where(excess, 0, earlier.to(tl.int32) + tl.cumsum(counts, 0) - counts)
    before = words + tl.load(row + BEFORE) + number.to(tl.int64) * (blocks + 1)
    tl.store(before + i, at, mask=i <= blocks)
