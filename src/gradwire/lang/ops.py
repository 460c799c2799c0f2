"""The operators of the codec language: what a codec's file imports.

| operator | gives |
| --- | --- |
| map(f, x, ...) | f of every element |
| reduce(min, x), reduce(max, x), reduce(sum, x) | one value a block, or one for the whole tensor |
| count(x) | how many values a block holds, or the whole tensor |
| random() | uniform in [0, 1), fresh for every element and every call |
| index() | the element's position in its parameter |
| concat(name=value, ...) | the payload: its fields in wire order |
| uint(bits, v), bf16(v), fp16(v), fp32(v), native(v) | v as it will be stored |
| where, clamp, floor, sqrt, inverse, isfinite, abs | arithmetic on symbols |

`decode` receives the fields by name, which is the operator that CompLL calls extract.
`map`, `reduce` and `abs` shadow Python's on purpose: in a codec's file they mean these.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

from gradwire.lang import ir
from gradwire.lang.source import LanguageError, here
from gradwire.lang.trace import Payload, Value, active, apply, as_number, lift

_REDUCTIONS: dict[object, str] = {builtins.min: "min", builtins.max: "max", builtins.sum: "sum"}
_SCOPES = {"element": ir.Scope.ELEMENT, "block": ir.Scope.BLOCK}


def map(function: Callable[..., Any], *values: Value) -> Value:
    """`function` of every element; values of narrower scope are broadcast."""
    active().uses("map")
    return lift(function(*values))


def reduce(function: object, value: Value) -> Value:
    """The minimum, maximum or sum (pass Python's `min`, `max` or `sum`).

    Over `g.blocks(n)` it gives one value a block, else one for the tensor. min and max propagate
    NaN and never give -0; sum adds in the fixed order that docs/wire-format.md states.
    """
    location = here()
    name = _REDUCTIONS.get(function)
    if name is None:
        raise LanguageError(location, f"reduce: takes min, max or sum, not {function!r}")
    active().uses("reduce")
    value = lift(value)
    node = as_number(value.node)
    if node.dtype == "bool":
        raise LanguageError(location, "reduce: a condition has no sum: use where(c, 1, 0)")
    if node.scope is ir.Scope.ELEMENT:
        node = ir.node("reduce", (node,), name, scope=ir.Scope.BLOCK, location=location)
        if value.blocked:
            return Value(node, blocked=True)
    if node.scope is not ir.Scope.BLOCK:
        raise LanguageError(location, "reduce: there is one value only, nothing to reduce")
    # a tensor's reduction runs over its blocks' reductions, so it splits over threads exactly
    return Value(ir.node("reduce", (node,), name, scope=ir.Scope.TENSOR, location=location))


def count(value: Value) -> Value:
    """How many values a block holds (the last may be shorter), or the tensor, as in `reduce`."""
    one = ir.node("const", attr=1.0, scope=ir.Scope.ELEMENT, location=here())
    return reduce(builtins.sum, Value(one, value.blocked))


def random(scope: str = "element") -> Value:
    """Uniform in [0, 1) in steps of 2^-24: one an element, or one a block (`scope="block"`)."""
    trace = active()
    if scope not in _SCOPES:
        raise LanguageError(here(), f"random: scope is 'element' or 'block', not {scope!r}")
    trace.uses("random")
    stream, trace.streams = trace.streams, trace.streams + 1
    node = ir.node("random", attr=stream, scope=_SCOPES[scope], location=here())
    return Value(node)


def index() -> Value:
    """The element's position in its parameter, modulo 2^32."""
    active().uses("index")
    return Value(ir.node("index", dtype="uint32", scope=ir.Scope.ELEMENT, location=here()))


def concat(**fields: Value) -> Payload:
    """The payload: fields in wire order. A field that is a plain number is stored as fp32."""
    location = here()
    active().uses("concat")
    if not fields:
        raise LanguageError(location, "concat: a payload needs a field")
    stored = {}
    for name, value in fields.items():
        value = lift(value)
        stored[name] = value if _is_stored(value.node) else fp32(value)
    return Payload(tuple(stored.items()))


def _is_stored(node: ir.Node) -> bool:
    return node.op in ("cast", "field") and node.dtype in ir.STORABLE


def _cast(value: object, dtype: str, rounding: str) -> Value:
    location = here()
    value = lift(value)
    if value.node.dtype == "bool":
        raise LanguageError(location, f"{dtype}: a condition is no number: use where(c, 1, 0)")
    scope = max(value.node.scope, ir.Scope.TENSOR)
    node = as_number(value.node)
    cast = ir.node("cast", (node,), rounding, dtype=dtype, scope=scope, location=location)
    return Value(cast, value.blocked)


def uint(bits: int, value: object) -> Value:
    """An unsigned integer of 1 to 8 bits: rounded toward zero, clamped; NaN gives 0."""
    if not isinstance(bits, int) or not 1 <= bits <= 8:
        raise LanguageError(here(), f"uint: takes 1 to 8 bits, not {bits!r}")
    if isinstance(value, Value) and value.node.dtype == "bool":
        value = where(value, 1, 0)
    return _cast(value, f"uint{bits}", "zero")


def bf16(value: object, toward: str = "nearest") -> Value:
    """bfloat16, rounded to nearest even, or outward: `toward="down"` or `"up"`. Saturates."""
    if toward not in ("nearest", "down", "up"):
        raise LanguageError(here(), f"bf16: toward is nearest, down or up, not {toward!r}")
    return _cast(value, "bf16", toward)


def fp16(value: object) -> Value:
    """IEEE half precision, to nearest even; finite values saturate at 65504."""
    return _cast(value, "fp16", "nearest")


def fp32(value: object) -> Value:
    """Single precision, as it is."""
    return _cast(value, "fp32", "stored")


def native(value: object) -> Value:
    """The dtype of the values that the kernel was made for: fp32, fp16 or bf16."""
    return {"fp32": fp32, "fp16": fp16, "bf16": bf16}[active().native](value)


def where(condition: object, chosen: object, other: object) -> Value:
    """`chosen` where the condition holds, else `other`."""
    return apply("where", condition, chosen, other)


def clamp(value: object, low: object, high: object) -> Value:
    """Between `low` and `high`; NaN gives `low`."""
    return apply("min", apply("max", value, low), high)


def floor(value: object) -> Value:
    """The largest integer not above."""
    return apply("floor", value)


def sqrt(value: object) -> Value:
    """The square root, correctly rounded."""
    return apply("sqrt", value)


def abs(value: object) -> Value:
    """The magnitude."""
    return apply("abs", value)


def isfinite(value: object) -> Value:
    """Whether it is neither infinite nor NaN."""
    return apply("isfinite", value)


def inverse(value: object) -> Value:
    """1 / value where that is finite, else 0: a step of 0 then gives code 0, not NaN."""
    quotient = apply("div", 1.0, value)
    return where(isfinite(quotient), quotient, 0.0)
