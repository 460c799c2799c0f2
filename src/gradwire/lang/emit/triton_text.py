"""The text of single operations in Triton: arithmetic, casts, loads and stores, constants."""

from __future__ import annotations

import math
import struct

from gradwire.lang import ir

ALU = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "tl.div_rn({}, {})",
    "max": "tl.where({0} > {1}, {0}, {1})",
    "min": "tl.where({0} < {1}, {0}, {1})",
    "neg": "negative({})",
    "abs": "tl.abs({})",
    "floor": "floor({})",
    "sqrt": "tl.sqrt_rn({})",
    "isfinite": "is_finite({})",
    "lt": "{} < {}",
    "le": "{} <= {}",
    "eq": "{} == {}",
    "ne": "{} != {}",
    "and": "{} & {}",
    "or": "{} | {}",
    "not": "~{}",
    "where": "tl.where({}, {}, {})",
}

CASTS = {
    ("fp32", "stored"): "to_fp32({})",
    ("bf16", "nearest"): "to_bf16_nearest({})",
    ("bf16", "down"): "to_bf16_down({})",
    ("bf16", "up"): "to_bf16_up({})",
    ("fp16", "nearest"): "to_fp16_nearest({})",
    ("fp16", "saturated"): "to_fp16_saturated({})",
    ("fp8", "nearest"): "to_fp8({})",
    ("int32", "zero"): "to_int32({})",
    ("code", "zero"): "to_code({}, {top}.0)",
}
WIDENINGS = {
    "bf16": "from_bf16({})", "fp16": "from_fp16({})", "fp8": "from_fp8({})", "fp32": "{}",
}  # fmt: skip

# dtype -> functions that load and store its bits
LOADS = {
    "fp32": "load32", "fp16": "load16", "bf16": "load16", "fp8": "load8", "int32": "load_int32",
}  # fmt: skip
STORES = {
    "fp32": "store32", "fp16": "store16", "bf16": "store16", "fp8": "store8",
    "int32": "store_int32",
}  # fmt: skip


def literal(value: float) -> str:
    """A constant as exact float32; subnormals and NaN, which Triton would change, by their bits."""
    single = ir.single(value)
    if single in (math.inf, -math.inf) or abs(single) >= 2.0**-126 or repr(single) == "0.0":
        text = f'float("{single}")' if math.isinf(single) else repr(single)
        return f"({text})" if text.startswith("-") else text
    (bits,) = struct.unpack("<I", struct.pack("<f", single))
    return f"number({bits:#x})"


def by_halves(x: str, numbers: list[str], first: int = 0) -> str:
    """The number that x stands for: literals are in no memory that could be indexed."""
    if len(numbers) == 1:
        return numbers[0]
    half = (len(numbers) + 1) // 2
    below = by_halves(x, numbers[:half], first)
    above = by_halves(x, numbers[half:], first + half)
    return f"tl.where({x} < {first + half}, {below}, {above})"
