"""The basis of every generated Triton kernel: rows and memory accesses.

Only generated code and the files next to this one import it.

Shapes: elements are tensors [G, W] of G blocks (triton_views.py), numbers of blocks [G, 1], numbers
of rows and calls scalars.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of the int64 table of rows: those of ROW (call.py), then those that lang/tiles.py adds.
VALUES = tl.constexpr(0)
RESIDUAL = tl.constexpr(1)
PAYLOAD = tl.constexpr(2)
SOURCES = tl.constexpr(3)
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
FULL_TILES = tl.constexpr(21)  # of all earlier rows; see lang/tiles.py
OTHER_TILES = tl.constexpr(22)  # of all earlier rows
FIRST_OTHER = tl.constexpr(23)  # the first tile of the row that is not full
TOTALS = tl.constexpr(24)  # offset in the workspace of sums of payloads
BLOCKS = tl.constexpr(25)  # the row's number of blocks
BEHIND = tl.constexpr(26)  # offset from the row of its numbers behind the table: see lang/tiles.py
FOUND = tl.constexpr(27)  # of a selection, 0 at first: see triton_selection.py
FLOOR = tl.constexpr(28)
CLOSED = tl.constexpr(29)
COLUMNS = tl.constexpr(30)

CHUNK = tl.constexpr(2048)  # blocks whose counts one program sums


# rows --------------------------------------------------------------------------------------------


@triton.jit
def find(table, n, steps, EARLIER: tl.constexpr = TILES):
    """The address of the row of this program's tile, found by bisection in `steps` steps.

    EARLIER: the column that counts the tiles of all earlier rows.
    """
    tile = tl.program_id(0).to(tl.int64)
    row = tile * 0
    for step in range(steps):
        later = row + (tl.full((), 1, tl.int64) << (steps - 1 - step))
        tiles = tl.load(table + later * COLUMNS + EARLIER, mask=later < n, other=2**62)
        row = tl.where(tiles <= tile, later, row)
    return table + row * COLUMNS


@triton.jit
def tile_at(row, tile, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """(first block, number of blocks, values per block) of a tile of the row.

    A tile is GROUP blocks, or what is left; a ragged block is its own tile.
    """
    full = tl.load(row + NUMEL) // BLOCK
    block = tl.minimum(tile * GROUP, full)
    ragged = block == full
    held = tl.where(ragged, 1, tl.minimum(full - block, GROUP)).to(tl.int32)
    m = tl.where(ragged, tl.load(row + NUMEL) % BLOCK, BLOCK).to(tl.int32)
    return block, held, m


@triton.jit
def full_tile(row, GROUP: tl.constexpr):
    """The first block of this program's tile, in a launch over full tiles."""
    return (tl.program_id(0) - tl.load(row + FULL_TILES)) * GROUP


@triton.jit
def other_tile(row, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """`tile_at` of this program, in a launch over the tiles that are not full."""
    tile = tl.program_id(0) - tl.load(row + OTHER_TILES) + tl.load(row + FIRST_OTHER)
    return tile_at(row, tile, BLOCK, GROUP)


@triton.jit
def fail(failed, row, wrong):
    """Store the number of a row with a malformed payload; the host checks it when it waits."""
    tl.store(failed, tl.load(row + NUMBER).to(tl.int32), mask=tl.max(wrong.to(tl.int32)) > 0)


# memory ------------------------------------------------------------------------------------------
# ALIGN: the known alignment of an address in bytes, a power of two, or 0. If it is known, a thread
# accesses several adjacent numbers at once. Payload addresses may be unaligned: then numbers are
# accessed in parts, if need be byte by byte.


@triton.jit
def aligned(address, TYPE: tl.constexpr, ALIGN: tl.constexpr):
    """A pointer of known alignment. `address` must be an integer: a pointer would be marked too."""
    pointer = address.to(tl.pointer_type(TYPE))
    return tl.multiple_of(pointer, ALIGN) if ALIGN > 1 else pointer


@triton.jit
def load8(address, at, mask, ALIGN: tl.constexpr):
    """uint8 number `at`, as int32."""
    return tl.load(aligned(address, tl.uint8, ALIGN) + at, mask=mask, other=0).to(tl.int32)


@triton.jit
def load16(address, at, mask, ALIGN: tl.constexpr):
    """uint16 number `at`, as uint32."""
    if ALIGN >= 2 or address % 2 == 0:
        bits = tl.load(aligned(address, tl.uint16, ALIGN) + at, mask=mask, other=0).to(tl.uint32)
    else:
        low = load8(address, at * 2, mask, 0)
        bits = (low | load8(address, at * 2 + 1, mask, 0) << 8).to(tl.uint32)
    return bits


@triton.jit
def load32(address, at, mask, ALIGN: tl.constexpr):
    """float32 number `at`."""
    if ALIGN >= 4 or address % 4 == 0:
        bits = tl.load(aligned(address, tl.uint32, ALIGN) + at, mask=mask, other=0)
    else:
        low = load16(address, at * 2, mask, ALIGN)
        bits = low | load16(address, at * 2 + 1, mask, ALIGN) << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_int32(address, at, mask, ALIGN: tl.constexpr):
    """int32 number `at`."""
    return load32(address, at, mask, ALIGN).to(tl.int32, bitcast=True)


@triton.jit
def store_int32(address, at, value, mask, ALIGN: tl.constexpr):
    store32(address, at, value.to(tl.int32).to(tl.float32, bitcast=True), mask, ALIGN)


@triton.jit
def store8(address, at, value, mask, ALIGN: tl.constexpr):
    """The lowest byte of an integer."""
    tl.store(aligned(address, tl.uint8, ALIGN) + at, value.to(tl.uint8), mask=mask)


@triton.jit
def store16(address, at, value, mask, ALIGN: tl.constexpr):
    """The lower half of a uint32."""
    if ALIGN >= 2 or address % 2 == 0:
        tl.store(aligned(address, tl.uint16, ALIGN) + at, value.to(tl.uint16), mask=mask)
    else:
        store8(address, at * 2, value & 0xFF, mask, 0)
        store8(address, at * 2 + 1, value >> 8, mask, 0)


@triton.jit
def store32(address, at, value, mask, ALIGN: tl.constexpr):
    """A float32."""
    bits = value.to(tl.uint32, bitcast=True)
    if ALIGN >= 4 or address % 4 == 0:
        tl.store(aligned(address, tl.uint32, ALIGN) + at, bits, mask=mask)
    else:
        store16(address, at * 2, bits & 0xFFFF, mask, ALIGN)
        store16(address, at * 2 + 1, bits >> 16, mask, ALIGN)
