"""The definition of every operation in torch: casts, arithmetic, reductions, planes.

Elements of blocks are [blocks, m], numbers of blocks [blocks, 1]. A target is correct if it gives
the same bits. Stored NaNs are canonical, so the sign and payload of intermediate NaNs do not
matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gradwire.lang import ir
from gradwire.lang.layout import planes

TORCH = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int32": torch.int32,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip
LARGEST_INT32 = 2147483520.0  # of the fp32 numbers that int32 can hold
LARGEST = {"fp8": 448.0, "fp16": 65504.0, "bf16": 3.3895313892515355e38}
NAN = {"fp8": 0x7F, "fp16": 0x7E00, "bf16": 0x7FC0}

Tensor = torch.Tensor


def cast(x: Tensor, dtype: str, rounding: str) -> Tensor:
    """fp32 to a stored dtype, or a stored dtype to fp32; see ir.py. Stores the canonical NaN."""
    if dtype == "fp32" and rounding != "stored":
        return x.to(torch.float32)
    if dtype in ir.TOP:
        top = float(ir.TOP[dtype])
        x = torch.where(x > 0.0, x, 0.0)
        return torch.where(x < top, x, top).to(torch.int64)
    if dtype == "int32":
        x = torch.where(torch.isnan(x), 0.0, x).clamp(-LARGEST_INT32, LARGEST_INT32)
        return x.to(torch.int32)
    if dtype == "fp32":
        return torch.where(torch.isnan(x), math.nan, x)
    if dtype != "fp16" or rounding == "saturated":
        largest = LARGEST[dtype]
        x = torch.where(torch.isfinite(x), x.clamp(-largest, largest), x)
    if rounding in ("down", "up"):
        # dropping the low bits rounds toward zero; rounding outward adds one if any was set
        bits = x.view(torch.int32)
        outward = (x < 0) if rounding == "down" else (x > 0)
        dropped = (bits & 0xFFFF) != 0
        bits = (bits & -0x10000) + (outward & dropped & torch.isfinite(x)).to(torch.int32) * 0x10000
        x = torch.where(torch.isnan(x), x, bits.view(torch.float32))
    # set the canonical NaN: torch's conversions give different bits
    narrow = x.to(TORCH[dtype])
    if dtype == "fp8":  # which has no infinities
        narrow.view(torch.uint8).masked_fill_(~torch.isfinite(x), NAN[dtype])
    else:
        narrow.view(torch.int16).masked_fill_(torch.isnan(x), NAN[dtype])
    return narrow


def _maximum(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a > b, a, b)


def _minimum(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a < b, a, b)


ALU: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "max": _maximum,
    "min": _minimum,
    "neg": torch.neg,
    "abs": torch.abs,
    "floor": torch.floor,
    # in fp64, since torch.sqrt of fp32 may be off by 1 ulp; here, rounding twice is exact
    "sqrt": lambda x: x.double().sqrt().float(),
    "isfinite": torch.isfinite,
    "lt": torch.lt,
    "le": torch.le,
    "eq": torch.eq,
    "ne": torch.ne,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
    "where": torch.where,
}


def tree_sum(x: Tensor) -> Tensor:
    """[blocks, m] -> [blocks, 1]: adds the upper half to the lower half until one value is left.

    The m values are padded with +0 to a power of two. More padding would not change the result,
    since the last addition of +0 turns -0 into +0.
    """
    blocks, m = x.shape
    total = torch.zeros(blocks, 1 << (m - 1).bit_length(), dtype=torch.float32)
    total[:, :m] = x
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total + 0.0


# amin and amax propagate NaN; adding +0 turns -0 into +0, so the result does not depend on order
REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "min": lambda x: x.amin(1, keepdim=True) + 0.0,
    "max": lambda x: x.amax(1, keepdim=True) + 0.0,
    "sum": tree_sum,
    "count": lambda x: x.sum(1, keepdim=True).to(torch.float32),
}


def ordered(x: Tensor) -> Tensor:
    """int64 keys in the order of fp32 numbers: -0 before +0, any NaN the largest."""
    bits = torch.where(torch.isnan(x), math.nan, x).view(torch.int32).to(torch.int64)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def rotate(x: Tensor, signs: Tensor, inverse: bool) -> Tensor:
    """[blocks, m] -> [blocks, m]: signs and a Hadamard transform, for each power of two in m."""
    parts, begin = [], 0
    while begin < x.shape[1]:
        size = 1 << ((x.shape[1] - begin).bit_length() - 1)
        part, sign = (t[:, begin : begin + size] for t in (x, signs))
        scale = torch.tensor(1.0 / math.sqrt(size), dtype=torch.float32)
        parts.append(hadamard(part) * scale * sign if inverse else hadamard(part * sign) * scale)
        begin += size
    return torch.cat(parts, 1)


def hadamard(x: Tensor) -> Tensor:
    """[blocks, 2^k]: sums and differences at distances 1, 2, 4, ..."""
    blocks, size = x.shape
    distance = 1
    while distance < size:
        pairs = x.reshape(blocks, -1, 2, distance)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        x = torch.stack((low + high, low - high), 2).reshape(blocks, size)
        distance *= 2
    return x


def pack(codes: Tensor, dtype: str) -> Tensor:
    """int64[blocks, m] -> uint8[blocks, bytes] in planes."""
    if dtype == "trit":
        return _join(codes, 5, 3)
    packed = [
        _join((codes >> at) & (2**width - 1), 8 // width, 2**width)
        for width, at in planes(ir.BITS[dtype])
    ]
    return torch.cat(packed, 1)


def unpack(packed: Tensor, dtype: str, m: int) -> Tensor:
    """uint8[blocks, bytes] -> int64[blocks, m]."""
    if dtype == "trit":
        return _split(packed, 5, 3, m)
    codes = torch.zeros(packed.shape[0], m, dtype=torch.int64)
    begin = 0
    for width, at in planes(ir.BITS[dtype]):
        length = (m * width + 7) // 8
        plane = packed[:, begin : begin + length]
        codes |= _split(plane, 8 // width, 2**width, m) << at
        begin += length
    return codes


def _join(digits: Tensor, per: int, base: int) -> Tensor:
    """int64[blocks, m] below `base` -> uint8[blocks, L]: byte j holds digits j, j + L, ..."""
    blocks, m = digits.shape
    length = -(-m // per)
    cells = torch.zeros(blocks, per * length, dtype=torch.int64)
    cells[:, :m] = digits
    weights = (base ** torch.arange(per, dtype=torch.int64)).view(1, per, 1)
    return (cells.view(blocks, per, length) * weights).sum(1).to(torch.uint8)


def _split(packed: Tensor, per: int, base: int, m: int) -> Tensor:
    weights = (base ** torch.arange(per, dtype=torch.int64)).view(1, per, 1)
    cells = packed.to(torch.int64).unsqueeze(1) // weights % base
    return cells.reshape(packed.shape[0], per * packed.shape[1])[:, :m]
