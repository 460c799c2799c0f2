"""Back ends: each a table of rules from lowered programs to source text, and nothing else.

Both have the rules below, of single operations: (C, Triton). The functions that they name are in
prelude.h and in triton_numbers.py.
"""

from __future__ import annotations

from gradwire.lang import ir
from gradwire.lang.ir import Node

Rule = tuple[str, str]


def _both(text: str) -> Rule:
    return text, text


ALU: dict[str, Rule] = {
    "add": _both("{} + {}"),
    "sub": _both("{} - {}"),
    "mul": _both("{} * {}"),
    "div": ("{} / {}", "tl.div_rn({}, {})"),
    "max": ("{0} > {1} ? {0} : {1}", "tl.where({0} > {1}, {0}, {1})"),
    "min": ("{0} < {1} ? {0} : {1}", "tl.where({0} < {1}, {0}, {1})"),
    "neg": ("-{}", "negative({})"),
    "abs": ("fabsf({})", "tl.abs({})"),
    "floor": ("floorf({})", "floor({})"),
    "sqrt": ("sqrtf({})", "tl.sqrt_rn({})"),
    "isfinite": _both("is_finite({})"),
    "lt": _both("{} < {}"),
    "le": _both("{} <= {}"),
    "eq": _both("{} == {}"),
    "ne": _both("{} != {}"),
    "and": _both("{} & {}"),
    "or": _both("{} | {}"),
    "not": ("!{}", "~{}"),
    "where": ("{} ? {} : {}", "tl.where({}, {}, {})"),
}

# (dtype, rounding); codes have one rule
CASTS: dict[tuple[str, str], Rule] = {
    ("fp32", "stored"): _both("to_fp32({})"),
    ("bf16", "nearest"): _both("to_bf16_nearest({})"),
    ("bf16", "down"): _both("to_bf16_down({})"),
    ("bf16", "up"): _both("to_bf16_up({})"),
    ("fp16", "nearest"): _both("to_fp16_nearest({})"),
    ("fp16", "saturated"): _both("to_fp16_saturated({})"),
    ("fp8", "nearest"): _both("to_fp8({})"),
    ("int32", "zero"): _both("to_int32({})"),
    ("code", "zero"): ("{to}({}, {zero}, {top})", "to_code({}, {top}.0)"),
}
# to fp32, from a dtype whose bits are in an integer register; from others:
WIDENINGS = {"bf16": "from_bf16({})", "fp16": "from_fp16({})", "fp8": "from_fp8({})", "fp32": "{}"}
WIDENED: Rule = ("(float){}", "{}.to(tl.float32)")


def cast(n: Node, target: int, operand: str, **bounds: object) -> str:
    """A cast of an operand for a target, the place of its texts in a rule."""
    if n.dtype == "fp32" and n.attr != "stored":
        return WIDENINGS.get(n.args[0].dtype, WIDENED[target]).format(operand)
    kind = "code" if n.dtype in ir.CODES else n.dtype
    return CASTS[kind, str(n.attr)][target].format(operand, **bounds)


def stream_name(stream: ir.Stream) -> str:
    kind = "shared" if stream.shared else "peer" if stream.source else "stream"
    return f"{kind}{stream.number}"
