"""What every generated Triton kernel stands on: rows, memory, conversions, reductions, the RNG.

lang/eager.py defines the meaning of each of these; this file must give the same bits, as must
prelude.h. Only generated code imports it, and lang/gpu.py.

Shapes: elements are [K, G, J], numbers of blocks [1, G, 1], numbers of rows and calls scalars;
K cells of a byte, G blocks, J places in a plane (see emit/triton.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of the table of rows, int64: those of rows.ROW, then what lang/gpu.py adds.
VALUES = tl.constexpr(0)
RESIDUAL = tl.constexpr(1)
PAYLOAD = tl.constexpr(2)
SOURCE = tl.constexpr(3)
NUMEL = tl.constexpr(4)
START = tl.constexpr(5)
KEY = tl.constexpr(6)
SHARED = tl.constexpr(7)
TILES = tl.constexpr(8)  # tiles of all rows before
PARTIALS = tl.constexpr(9)  # where in the workspace the row's partial results begin
NUMBER = tl.constexpr(10)  # of the row, counted from 1
CAPACITY = tl.constexpr(11)  # entries at most
COUNTED = tl.constexpr(12)  # where in a payload blocks' counts or flags begin
TAIL = tl.constexpr(13)  # where in a payload the parts of a length that depends on data begin
STATE = tl.constexpr(14)  # these are in words of the workspace, see lang/tiles.py
BEFORE = tl.constexpr(15)
TIED = tl.constexpr(16)
KEYS = tl.constexpr(17)
STAGED = tl.constexpr(18)
SIZES = tl.constexpr(19)  # k of up to two order statistics
COLUMNS = tl.constexpr(21)

ALIGNED = tl.constexpr(16)  # bytes, of a full tile's values and residuals: one load of a thread
WORD = tl.constexpr(4)  # bytes, of a full tile's codes: what a thread packs or unpacks at once

NAN = tl.constexpr(0x7FC00000)
INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(0x80000000)
LEAST = tl.constexpr(-(2**31))
MOST = tl.constexpr(2**31 - 1)


# rows --------------------------------------------------------------------------------------------


@triton.jit
def find(table, n, steps):
    """The columns of the row that this program's tile belongs to, by bisection in `steps` steps."""
    tile = tl.program_id(0).to(tl.int64)
    row = tile * 0
    for step in range(steps):
        later = row + (tl.full((), 1, tl.int64) << (steps - 1 - step))
        tiles = tl.load(table + later * COLUMNS + TILES, mask=later < n, other=2**62)
        row = tl.where(tiles <= tile, later, row)
    return table + row * COLUMNS


@triton.jit
def place(row, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """(first block, blocks, values of each, whether the tile is full) of this program.

    A ragged block comes alone. A full tile has GROUP blocks of BLOCK values, aligned in memory.
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
    """Remember a row whose payload no encode makes; the host looks when it waits anyway."""
    tl.store(failed, tl.load(row + NUMBER).to(tl.int32), mask=tl.max(wrong.to(tl.int32)) > 0)


# memory: addresses of payloads have no alignment, but where a full tile's are aligned, a thread
# takes several of the numbers that lie together ---------------------------------------------------


@triton.jit
def memory(address, TYPE: tl.constexpr, FULL: tl.constexpr):
    """A pointer to values or residuals, which are aligned in a full tile."""
    return aligned(address, TYPE, ALIGNED) if FULL else address.to(tl.pointer_type(TYPE))


@triton.jit
def aligned(address, TYPE: tl.constexpr, NBYTES: tl.constexpr):
    """A pointer of known alignment. Never to be made of one that exists: it would mark that too."""
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


# numbers -----------------------------------------------------------------------------------------


@triton.jit
def bits_of(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def number(BITS: tl.constexpr):
    """A float32 by its bits: those that a literal would lose."""
    return tl.full((), BITS, tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def negative(x):
    return float_of(bits_of(x) ^ SIGN)


@triton.jit
def floor(x):
    """tl.floor takes subnormal numbers for 0 on some GPUs."""
    small = tl.abs(x) < 8388608.0  # others have no fraction
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
    """Saturate a rounded magnitude, keep infinities, make one NaN."""
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
    r = tl.where(magnitude >= 0x477FE000, 0x7BFF, r)
    r = tl.where(magnitude >= INFINITY, 0x7C00, r) | (bits >> 31 << 15)
    return tl.where(magnitude > INFINITY, 0x7E00, r)


@triton.jit
def to_code(x, TOP: tl.constexpr):
    x = tl.where(x > 0.0, x, 0.0)
    return tl.where(x < TOP, x, TOP).to(tl.int32)


@triton.jit
def to_int32(x):
    x = tl.where(x == x, x, 0.0)
    x = tl.where(x < 2147483520.0, x, 2147483520.0)
    return tl.where(x > -2147483520.0, x, -2147483520.0).to(tl.int32)


@triton.jit
def power3(k):
    """3^k of 0 to 4."""
    small = tl.where(k == 0, 1, tl.where(k == 1, 3, 9))
    return tl.where(k < 3, small, tl.where(k == 3, 27, 81))


@triton.jit
def from_bf16(h):
    return float_of(h << 16)


@triton.jit
def from_fp16(h):
    # as a float, the 15 bits are the value times 2^-112, subnormals included
    scaled = bits_of(float_of((h & 0x7FFF) << 13) * 5.192296858534828e33)
    special = (h & 0x7C00) == 0x7C00
    magnitude = tl.where(special, INFINITY | (h & 0x3FF) << 13, scaled)
    return float_of(magnitude | (h & 0x8000) << 16)


# reductions --------------------------------------------------------------------------------------


@triton.jit
def ordered(x):
    """Floats in an order of integers, so that minima and maxima see NaN at the ends."""
    i = x.to(tl.int32, bitcast=True)
    return i ^ ((i >> 31) & MAGNITUDE)


@triton.jit
def extreme(chosen, low, high):
    """The float of an ordered integer: +0 for either zero, NaN if there was one."""
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
    """How many elements of a block fulfil the condition: [K, G, J] -> [1, G, 1]."""
    return tl.sum(tl.sum((condition & mask).to(tl.int32), 0), 1)[None, :, None].to(tl.float32)


@triton.jit
def tree_sum(x, mask, GROUP: tl.constexpr, J: tl.constexpr, LOG: tl.constexpr):
    """[1, G, J] -> [1, G, 1]: the upper half is added to the lower until one is left; J = 2^LOG.

    A sum of two has no order, so each step is the definition's. Both halves get it: a tensor that
    shrank would give all threads all blocks, and that layout would spread to what uses the sum.
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
    """[1, G, J] -> [1, G, J]: every power of two in m is transformed by itself, and normalised.

    Those powers lie the largest first, so i ^ m has the size of i's part as its highest bit, and
    the partner of i at a distance below that size is in the same part.
    """
    x = tl.reshape(x, GROUP, J)
    part = tl.arange(0, J)[None, :] ^ m
    first = (tl.arange(0, 2) == 0)[None, None, :, None]
    for s in tl.static_range(LOG):
        bits = tl.reshape(bits_of(x), GROUP, J >> (s + 1), 2, 1 << s)
        # the other one of the pair, by integers that wrap; 64 bits, since Triton's interpreter
        # does not wrap sums
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
    """1 or -1, drawn."""
    return tl.where(u < 0.5, 1.0, -1.0)


@triton.jit
def in_view(
    x, i, mask, FULL: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, K: tl.constexpr, J: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """[1, G, ALL] in the natural order -> [K, G, J], where elements `i` are."""
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

    Programs (row, C columns, reduction from `index`). `done`: passes before this one. The last pass
    leaves the row's number behind its partial results; one more would find and leave it again.
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


# random numbers: lang/rng.py ---------------------------------------------------------------------


@triton.jit
def stream(key, NUMBER: tl.constexpr):
    """The two 32-bit words that a stream adds to its indices."""
    x = key.to(tl.uint64, bitcast=True) + (NUMBER + 1) * 0x9E3779B97F4A7C15 % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x & 0xFFFFFFFF).to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def weyl(index):
    """A step of the sequence for every index; the product of a sum is the sum of the products."""
    return index.to(tl.uint32) * 0x9E3779B1


@triton.jit
def uniform(at, high):
    """`at` is weyl(index + low)."""
    x = at ^ (at >> 16)
    x = (x ^ high) * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return (x >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
