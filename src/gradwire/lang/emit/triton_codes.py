"""Entries in Triton: the selected elements, the positions of received entries, codes in runs.

Only generated code imports this file. Shapes as in triton_prelude.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.lang.emit.triton_numbers import bits_of, power3
from gradwire.lang.emit.triton_prelude import (
    BEFORE,
    KEYS,
    NUMEL,
    STATE,
    TIED,
    TILES,
    fail,
    load8,
    store8,
)
from gradwire.lang.emit.triton_selection import CUT, TAKEN, positions_of

RUN = tl.constexpr(128)  # entries that are packed together
RUNS = tl.constexpr(16)  # packed at once
BYTES = tl.constexpr(4096)  # cleared at once


# selected elements of a tile ---------------------------------------------------------------------


@triton.jit
def earlier(condition):
    """[G, W] -> [G, W]: how many earlier elements of the block satisfy the condition."""
    x = condition.to(tl.int32)
    return tl.cumsum(x, 1) - x


@triton.jit
def total(condition):
    """[G, W] -> [G, 1]: how many elements of the block satisfy the condition."""
    return tl.sum(condition.to(tl.int32), 1)[:, None]


@triton.jit
def segments(row, words, block, g, here, blocks):
    """Of every block: its first candidate, their number, earlier ties, earlier and own entries."""
    tied = words + tl.load(row + TIED) + block + g
    first = tl.load(tied + blocks, mask=here, other=0)
    many = tl.load(tied + 2 * blocks, mask=here, other=0)
    ties = tl.load(tied, mask=here, other=0)
    before = words + tl.load(row + BEFORE) + block + g
    entries = tl.load(before, mask=here, other=0)
    return first, many, ties, entries, tl.load(before + 1, mask=here, other=0) - entries


@triton.jit
def chosen(row, words, first, many, begin, ties, entries, PIECE: tl.constexpr):
    """PIECE candidates of every block from number `begin` on: [G, PIECE] each of

    their positions in the block, whether they are selected, their entry numbers; of equal keys, the
    first are. Then the ties and entries before the next.
    """
    state = words + tl.load(row + STATE)
    e = begin + tl.arange(0, PIECE)[None, :]
    mask = e < many
    key = bits_of(tl.load(words + tl.load(row + KEYS) + first + e, mask=mask, other=0))
    i = tl.load(positions_of(row, words) + first + e, mask=mask, other=0).to(tl.int32)
    cut = bits_of(tl.load(state + CUT))
    equal = mask & (key == cut)
    tied = equal & (ties + earlier(equal) < tl.load(state + TAKEN))
    hit = (mask & (key > cut)) | tied
    return i, hit, entries + earlier(hit), ties + total(equal), entries + total(hit)


# entries of a payload ----------------------------------------------------------------------------


@triton.jit
def listed(
    failed, row, address, first, end, entries, begin, m, PIECE: tl.constexpr, BITS: tl.constexpr
):
    """PIECE entries of every block from its number `begin` on: [G, PIECE] each of

    their positions in the block, whether there is one, their entry numbers. Valid positions ascend,
    so there are at most m; an entry that is not valid is left out, and the row fails.
    """
    e = begin + tl.arange(0, PIECE)[None, :]
    mask, entry = e < tl.minimum(end - first, m), first + e
    i = code_at(address, entry, entries, mask, BITS)
    last = code_at(address, entry - 1, entries, mask & (e > 0), BITS)
    valid = mask & (i < m) & ((e == 0) | (last < i))
    fail(failed, row, mask & ~valid)
    fail(failed, row, end - first > m)
    return i, valid, entry


@triton.jit
def code_at(address, e, entries, mask, BITS: tl.constexpr):
    """Code `e` of `entries`, as int32; BITS 0: a trit. Comparisons replace divisions."""
    run = e >> 7
    m, j = tl.minimum(entries - run * RUN, RUN), e & 127
    if BITS == 0:
        length = (m + 4) // 5
        k = (j >= length).to(tl.int32) + (j >= 2 * length) + (j >= 3 * length) + (j >= 4 * length)
        byte = load8(address, run * 26 + j - k * length, mask, 0)
        code = byte // power3(k) % 3
    else:
        at, code = run * (16 * BITS), j * 0
        for p in tl.static_range(4):
            if BITS & (8 >> p):
                length, k = (m * (8 >> p) + 7) >> 3, j * 0
                for cell in tl.static_range(1, 1 << p):
                    k += (j >= cell * length).to(tl.int32)
                byte = load8(address, at + j - k * length, mask, 0)
                digit = (byte >> (k * (8 >> p))) & ((1 << (8 >> p)) - 1)
                code |= digit << (BITS & (0xF0 >> p) & 0xF)
                at += length
    return code


# entries as they are stored ----------------------------------------------------------------------


@triton.jit
def tail_nbytes(entries, BITS: tl.constexpr):
    """Bytes of `entries` codes in runs; BITS 0: trits."""
    runs, m = entries >> 7, entries & 127
    if BITS == 0:
        nbytes = runs * 26 + (m + 4) // 5
    else:
        nbytes = runs * (16 * BITS)
        for p in tl.static_range(4):
            if BITS & (8 >> p):
                nbytes += (m * (8 >> p) + 7) >> 3
    return nbytes


@triton.jit
def share_of(row, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """(index of this program among those of the row, their number)."""
    full = tl.load(row + NUMEL) // BLOCK
    ragged = (tl.load(row + NUMEL) % BLOCK > 0).to(tl.int64)
    part = tl.program_id(0) - tl.load(row + TILES)
    return part.to(tl.int32), ((full + GROUP - 1) // GROUP + ragged).to(tl.int32)


@triton.jit
def pack_runs(staged, address, part, parts, entries, BITS: tl.constexpr):
    """Pack this program's share of the runs of a column of staged codes."""
    r = tl.arange(0, RUNS)[:, None]
    for first in range(part * RUNS, (entries + RUN - 1) >> 7, parts * RUNS):
        run = first + r
        m = tl.minimum(tl.maximum(entries - run * RUN, 0), RUN)
        if BITS == 0:
            j, length, byte = tl.arange(0, 32)[None, :], (m + 4) // 5, 0 * r
            for k in tl.static_range(5):
                byte += _cell(staged, run, j, k, length, m) * 3**k
            store8(address, run * 26 + j, byte, j < length, 0)
        else:
            at = run * (16 * BITS)
            for p in tl.static_range(4):
                if BITS & (8 >> p):
                    j, length = tl.arange(0, 128 >> p)[None, :], (m * (8 >> p) + 7) >> 3
                    byte = 0 * r
                    for k in tl.static_range(1 << p):
                        code = _cell(staged, run, j, k, length, m)
                        digit = (code >> (BITS & (0xF0 >> p) & 0xF)) & ((1 << (8 >> p)) - 1)
                        byte |= digit << (k * (8 >> p))
                    store8(address, at + j, byte, j < length, 0)
                    at += length


@triton.jit
def _cell(staged, run, j, K: tl.constexpr, length, m):
    """The codes in cell K of the bytes `j` of a run's plane."""
    place = j + K * length
    return tl.load(staged + run * RUN + place, mask=(j < length) & (place < m), other=0)


@triton.jit
def clear_bytes(begin, end, part, parts):
    """Zero this program's share of the bytes from `begin` to `end`, two addresses."""
    i = tl.arange(0, BYTES)
    for at in range(part * BYTES, (end - begin).to(tl.int32), parts * BYTES):
        store8(begin, at + i, i * 0, begin + at + i < end, 0)
