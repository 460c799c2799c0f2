"""The basis of every generated Triton kernel: rows and memory accesses.

Only generated code and the files next to this one import it.

Shapes: elements are [K, G, J], numbers of blocks [1, G, 1], numbers of rows and calls scalars, with
K cells per byte, G blocks, J bytes of a plane (see emit/triton.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of the int64 table of rows: those of ROW (call.py), then those that lang/tiles.py adds.
VALUES = tl.constexpr(0)
RESIDUAL = tl.constexpr(1)
PAYLOAD = tl.constexpr(2)
SOURCE = tl.constexpr(3)
NUMEL = tl.constexpr(4)
START = tl.constexpr(5)
KEY = tl.constexpr(6)
SHARED = tl.constexpr(7)
TILES = tl.constexpr(8)  # tiles of all earlier rows
PARTIALS = tl.constexpr(9)  # offset in the workspace of the row's partial results
NUMBER = tl.constexpr(10)  # number of the row, from 1
CAPACITY = tl.constexpr(11)  # the most entries
COUNTED = tl.constexpr(12)  # offset in a payload of the counts or flags of blocks
TAIL = tl.constexpr(13)  # offset in a payload of the parts whose length depends on data
STATE = tl.constexpr(14)  # from here, offsets in words of the workspace: see lang/tiles.py
BEFORE = tl.constexpr(15)
TIED = tl.constexpr(16)
KEYS = tl.constexpr(17)
STAGED = tl.constexpr(18)
SIZES = tl.constexpr(19)  # k of up to two order statistics
COLUMNS = tl.constexpr(21)

ALIGNED = tl.constexpr(16)  # alignment in bytes of a full tile's values and residuals
WORD = tl.constexpr(4)  # alignment in bytes of a full tile's codes


# rows --------------------------------------------------------------------------------------------


@triton.jit
def find(table, n, steps):
    """The address of the row of this program's tile, found by bisection in `steps` steps."""
    tile = tl.program_id(0).to(tl.int64)
    row = tile * 0
    for step in range(steps):
        later = row + (tl.full((), 1, tl.int64) << (steps - 1 - step))
        tiles = tl.load(table + later * COLUMNS + TILES, mask=later < n, other=2**62)
        row = tl.where(tiles <= tile, later, row)
    return table + row * COLUMNS


@triton.jit
def place(row, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """(first block, number of blocks, values per block, whether it is full) of this program's tile.

    A ragged block is its own tile. A full tile has GROUP blocks of BLOCK values, aligned in memory.
    """
    full = tl.load(row + NUMEL) // BLOCK
    tile = tl.program_id(0) - tl.load(row + TILES)
    block = tl.minimum(tile * GROUP, full)
    ragged = block == full
    held = tl.where(ragged, 1, tl.minimum(full - block, GROUP)).to(tl.int32)
    m = tl.where(ragged, tl.load(row + NUMEL) % BLOCK, BLOCK).to(tl.int32)
    loose = (tl.load(row + VALUES) | tl.load(row + RESIDUAL)) % ALIGNED
    return block, held, m, (full - block >= GROUP) & (loose == 0)


@triton.jit
def fail(failed, row, wrong):
    """Store the number of a row with a malformed payload; the host checks it when it waits."""
    tl.store(failed, tl.load(row + NUMBER).to(tl.int32), mask=tl.max(wrong.to(tl.int32)) > 0)


# memory ------------------------------------------------------------------------------------------
# Payload addresses may be unaligned. If those of a full tile are aligned, a thread accesses several
# adjacent numbers at once.


@triton.jit
def memory(address, TYPE: tl.constexpr, FULL: tl.constexpr):
    """A pointer to values or residuals, which are aligned in a full tile."""
    return aligned(address, TYPE, ALIGNED) if FULL else address.to(tl.pointer_type(TYPE))


@triton.jit
def aligned(address, TYPE: tl.constexpr, NBYTES: tl.constexpr):
    """A pointer of known alignment. `address` must be an integer: a pointer would be marked too."""
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), NBYTES)


@triton.jit
def load8(address, at, mask, FULL: tl.constexpr):
    """uint8 number `at`, as int32."""
    if FULL and address % WORD == 0:
        byte = tl.load(aligned(address, tl.uint8, WORD) + at, mask=mask, other=0)
    else:
        byte = tl.load(address.to(tl.pointer_type(tl.uint8)) + at, mask=mask, other=0)
    return byte.to(tl.int32)


@triton.jit
def load16(address, at, mask, FULL: tl.constexpr):
    """uint16 number `at`, as uint32."""
    if FULL and address % ALIGNED == 0:
        bits = tl.load(aligned(address, tl.uint16, ALIGNED) + at, mask=mask, other=0).to(tl.uint32)
    elif address % 2 == 0:
        bits = tl.load(address.to(tl.pointer_type(tl.uint16)) + at, mask=mask, other=0).to(
            tl.uint32
        )
    else:
        low = load8(address, at * 2, mask, False)
        bits = (low | load8(address, at * 2 + 1, mask, False) << 8).to(tl.uint32)
    return bits


@triton.jit
def load32(address, at, mask, FULL: tl.constexpr):
    """float32 number `at`."""
    if FULL and address % ALIGNED == 0:
        bits = tl.load(aligned(address, tl.uint32, ALIGNED) + at, mask=mask, other=0)
    elif address % 4 == 0:
        bits = tl.load(address.to(tl.pointer_type(tl.uint32)) + at, mask=mask, other=0)
    else:
        low = load16(address, at * 2, mask, False)
        bits = low | load16(address, at * 2 + 1, mask, False) << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_int32(address, at, mask, FULL: tl.constexpr):
    """int32 number `at`."""
    return load32(address, at, mask, FULL).to(tl.int32, bitcast=True)


@triton.jit
def store_int32(address, at, value, mask, FULL: tl.constexpr):
    store32(address, at, value.to(tl.int32).to(tl.float32, bitcast=True), mask, FULL)


@triton.jit
def store8(address, at, value, mask, FULL: tl.constexpr):
    """The lowest byte of an integer."""
    if FULL and address % WORD == 0:
        tl.store(aligned(address, tl.uint8, WORD) + at, value.to(tl.uint8), mask=mask)
    else:
        tl.store(address.to(tl.pointer_type(tl.uint8)) + at, value.to(tl.uint8), mask=mask)


@triton.jit
def store16(address, at, value, mask, FULL: tl.constexpr):
    """The lower half of a uint32."""
    if FULL and address % ALIGNED == 0:
        tl.store(aligned(address, tl.uint16, ALIGNED) + at, value.to(tl.uint16), mask=mask)
    elif address % 2 == 0:
        tl.store(address.to(tl.pointer_type(tl.uint16)) + at, value.to(tl.uint16), mask=mask)
    else:
        store8(address, at * 2, value & 0xFF, mask, False)
        store8(address, at * 2 + 1, value >> 8, mask, False)


@triton.jit
def store32(address, at, value, mask, FULL: tl.constexpr):
    """A float32."""
    bits = value.to(tl.uint32, bitcast=True)
    if FULL and address % ALIGNED == 0:
        tl.store(aligned(address, tl.uint32, ALIGNED) + at, bits, mask=mask)
    elif address % 4 == 0:
        tl.store(address.to(tl.pointer_type(tl.uint32)) + at, bits, mask=mask)
    else:
        store16(address, at * 2, bits & 0xFFFF, mask, False)
        store16(address, at * 2 + 1, bits >> 16, mask, False)
