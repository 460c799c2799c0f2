"""The operators of the codec language, which codecs import.

| operator | gives |
| --- | --- |
| map(f, x, ...) | f of every element |
| reduce(min, x), reduce(max, x), reduce(sum, x) | one value per block or per tensor |
| count(x), count(condition) | the number of values of a block or tensor, or of those that satisfy
it |
| random(), index() | for every element, uniform in [0, 1); its position |
| filter(condition, capacity) | a selection: the elements where the condition holds |
| topk(key, k, among=condition) | a selection: the elements of the k largest keys |
| gather(x, selection), scatter(x, selection) | elements to entries, and back |
| sort(x, every=n)[k] | the k-th largest of all values, or of a sample |
| rotate(x) | randomised Hadamard transform of every block (or of the whole tensor) |
| decomp(m, rank), matmul(a, b) | low-rank factors of matrix(x, columns), and their product |
| concat(name=value, ...) | the payload: its fields in wire order |
| uint(bits, v), trit(v), int32(v) | v converted to an integer that can be stored |
| bf16(v), fp16(v), fp32(v), fp8(v), native(v) | v converted to a float that can be stored |
| keep(codes, flag) | codes that are stored only for blocks whose flag is set |
| table(numbers), lookup(table, code) | numbers that can change without recompiling |
| where, clamp, floor, sqrt, inverse, isfinite, abs, share | arithmetic on symbols; a size |

`decode` receives the fields by name; CompLL calls this operator extract. `map`, `filter`, `reduce`
and `abs` shadow Python's functions on purpose.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice
from typing import Any

from gradwire.lang import ir, shapes
from gradwire.lang.matrices import decomp, elements, matmul, matrix
from gradwire.lang.selections import filter, gather, keep, scatter, share, sort, topk
from gradwire.lang.source import mistake
from gradwire.lang.trace import (
    Payload,
    Value,
    active,
    apply,
    as_number,
    constant,
    integer,
    lift,
    numbers_of_elements,
    record,
    stream,
)

__all__ = [
    "abs", "bf16", "clamp", "concat", "count", "decomp", "elements", "filter", "floor", "fp8",
    "fp16", "fp32", "gather", "index", "int32", "inverse", "isfinite", "keep", "lookup", "map",
    "matmul", "matrix", "native", "random", "reduce", "rotate", "scatter", "share", "sort", "sqrt",
    "table", "topk", "trit", "uint", "where",
]  # fmt: skip
MAX_TABLE = 256
_REDUCTIONS: dict[object, str] = {builtins.min: "min", builtins.max: "max", builtins.sum: "sum"}
_SCOPES = {"element": ir.Scope.ELEMENT, "block": ir.Scope.BLOCK}


def map(function: Callable[..., Any], *values: Value) -> Value:
    """`function` of every element; values of narrower scope are broadcast."""
    if not callable(function):
        raise mistake(f"map: takes a function first, not {function!r}")
    active().uses("map")
    return lift(function(*values))


def reduce(function: object, value: Value) -> Value:
    """The minimum, maximum or sum (pass Python's `min`, `max` or `sum`).

    Over `g.blocks(n)` it gives one value per block, else one for the tensor. min and max propagate
    NaN and never give -0; sum adds in the fixed order defined in docs/internals/wire-format.md.
    """
    name = next((name for known, name in _REDUCTIONS.items() if known is function), None)
    if name is None:
        called = getattr(function, "__name__", repr(function))
        raise mistake(f"reduce: takes min, max or sum, not {called}")
    active().uses("reduce")
    value = lift(value)
    shapes.none(value.node, "reduce")
    if value.node.dtype == "bool":
        raise mistake("reduce: a condition has no sum: use count(c)")
    return _reduce(name, as_number(value.node), value.blocked)


def _reduce(kind: str, node: ir.Node, blocked: bool) -> Value:
    if node.scope is ir.Scope.ELEMENT:
        node = record("reduce", (node,), kind, scope=ir.Scope.BLOCK)
        if blocked:
            return Value(node, blocked=True)
    if node.scope is not ir.Scope.BLOCK:
        raise mistake("reduce: takes elements or values of blocks, not one value")
    # a tensor is reduced block by block, so the result does not depend on the number of threads
    kind = "sum" if kind == "count" else kind
    return Value(record("reduce", (node,), kind, scope=ir.Scope.TENSOR))


def count(value: Value) -> Value:
    """The number of values in a block (the last may be shorter) or the tensor; for a condition, the
    number of values that satisfy it."""
    active().uses("reduce")
    value = lift(value)
    shapes.none(value.node, "count")
    if value.node.scope is ir.Scope.CONSTANT:
        raise mistake("count: takes elements or conditions, not a number")
    if value.node.dtype == "bool":
        return _reduce("count", value.node, value.blocked)
    one = record("const", attr=1.0, scope=ir.Scope.ELEMENT)
    return _reduce("sum", one, value.blocked)


def random(scope: str = "element", shared: str | None = None) -> Value:
    """Uniform in [0, 1) in steps of 2^-24: one per element, or per block with `scope="block"`.

    Every call in encode draws new numbers; the n-th call in decode gives those of the n-th call in
    encode again, as the rank that encoded the payload drew them. With `shared=NAME`, all ranks draw
    the same numbers, in encode and in decode, for the contributions to a sum and for the sum.
    """
    trace, name = active(), _name(scope, _SCOPES, "random: scope")
    trace.uses("random")
    return Value(record("random", attr=stream(shared), scope=_SCOPES[name]))


def index(of: str = "parameter") -> Value:
    """The element's position in its parameter, modulo 2^32, or in its block with `of="block"`.

    Arithmetic is fp32, so positions beyond 2^24 are not exact.
    """
    name = _name(of, ("parameter", "block"), "index: of")
    active().uses("index")
    attr = "block" if name == "block" else None
    return Value(record("index", (), attr, dtype="uint32", scope=ir.Scope.ELEMENT))


def concat(**fields: Value) -> Payload:
    """The payload: fields in wire order. A field without a stored dtype is stored as fp32."""
    active().uses("concat")
    if not fields:
        raise mistake("concat: a payload needs a field")
    stored = {}
    for name, value in fields.items():
        value = lift(value)
        stored[name] = value if _is_stored(value.node) else fp32(value)
    return Payload(tuple(stored.items()))


def _is_stored(node: ir.Node) -> bool:
    stored = node.op in ("cast", "field", "select", "keep", "decompose")
    return stored and node.dtype in ir.STORABLE


def _cast(value: object, dtype: str, rounding: str) -> Value:
    value = lift(value)
    if value.node.dtype == "bool":
        raise mistake(f"{dtype}: a condition is not a number: use where(c, 1, 0)")
    if value.node.dtype == "selection":
        raise mistake(f"{dtype}: a selection is not a number: gather(x, selection)")
    for n in ir.walk([value.node], _chosen) if dtype in ir.TOP else ():
        # what is computed is clamped: which numbers meet there is not known while tracing
        number = active().table[n.attr] if isinstance(n.attr, int) else n.attr
        if isinstance(number, float) and not -1.0 < number < ir.TOP[dtype] + 1.0:
            raise mistake(f"{dtype}: holds 0 to {ir.TOP[dtype]}, not the constant {number:g}")
    scope = max(value.node.scope, ir.Scope.TENSOR)
    cast = record("cast", (as_number(value.node),), rounding, dtype=dtype, scope=scope)
    return Value(cast, value.blocked, value.within)


def _chosen(n: ir.Node) -> tuple[ir.Node, ...]:
    """The numbers that `where` and `lookup` choose from."""
    return n.args[1:] if n.op == "lookup" or n.attr == "where" else ()


def _name(given: object, known: Iterable[str], option: str) -> str:
    """One of the known names, as Python's text."""
    names = tuple(known)
    if not isinstance(given, str) or given not in names:
        *others, last = (repr(name) for name in names)
        raise mistake(f"{option} is {', '.join(others)} or {last}, not {given!r}")
    return str(given)


def uint(bits: int, value: object) -> Value:
    """An unsigned integer of 1 to 8 bits: rounded toward zero, clamped; NaN gives 0."""
    width = integer(bits)
    if width is None or not 1 <= width <= 8:
        raise mistake(f"uint: takes 1 to 8 bits, not {bits!r}")
    if isinstance(value, Value) and value.node.dtype == "bool":
        value = where(value, 1, 0)
    return _cast(value, f"uint{width}", "zero")


def int32(value: object) -> Value:
    """A 32-bit integer: rounded toward zero, clamped; NaN gives 0."""
    return _cast(value, "int32", "zero")


def trit(value: object) -> Value:
    """0, 1 or 2, stored five per byte: rounded toward zero, clamped; NaN gives 0."""
    return _cast(value, "trit", "zero")


def bf16(value: object, toward: str = "nearest") -> Value:
    """bfloat16, rounded to nearest even, or outward: `toward="down"` or `"up"`. Saturates."""
    return _cast(value, "bf16", _name(toward, ("nearest", "down", "up"), "bf16: toward"))


def fp16(value: object) -> Value:
    """IEEE half precision, rounded to nearest even: from 65520 on infinite, so that a GradScaler
    sees the overflow. Where a residual keeps the rest, saturates: see `gradwire.lang.forms`."""
    return _cast(value, "fp16", "saturated" if active().feedback else "nearest")


def fp32(value: object) -> Value:
    """Single precision, unchanged."""
    return _cast(value, "fp32", "stored")


def fp8(value: object) -> Value:
    """OCP E4M3 (3 bits of mantissa, to 448), rounded to nearest even. Finite values saturate;
    infinities and NaN give NaN."""
    return _cast(value, "fp8", "nearest")


def native(value: object) -> Value:
    """The dtype of the kernel's values: fp32, fp16 or bf16."""
    return {"fp32": fp32, "fp16": fp16, "bf16": bf16}[active().native](value)


def where(condition: object, chosen: object, other: object) -> Value:
    """`chosen` where the condition holds, else `other`."""
    return apply("where", condition, chosen, other)


def clamp(value: object, low: object, high: object) -> Value:
    """Between `low` and `high`; NaN gives `low`."""
    return apply("min", apply("max", value, low), high)


def floor(value: object) -> Value:
    """The largest integer that is not larger."""
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
    """1 / value where that is finite, else 0, so that a step of 0 gives code 0, not NaN."""
    quotient = apply("div", 1.0, value)
    return where(isfinite(quotient), quotient, 0.0)


# transforms ------------------------------------------------------------------------------------


def rotate(value: Value, inverse: bool = False, full: bool = False) -> Value:
    """Randomised Hadamard transform; all ranks draw the same signs.

    Args:
        inverse: apply the inverse.
        full: over the whole tensor instead of each block; this is not fused.
    """
    active().uses("rotate")
    for option, given in (("inverse", inverse), ("full", full)):
        if type(given) is not bool:
            raise mistake(f"rotate: {option}={given!r}: use True or False")
    rotation = ir.Rotation(stream("rotate"), inverse, full)
    node = numbers_of_elements(value, "rotate")
    node = record("rotate", (node,), rotation, scope=ir.Scope.ELEMENT)
    return Value(node, value.blocked, value.within and not full)


# tables ----------------------------------------------------------------------------------------


def table(numbers: Sequence[float]) -> list[Value]:
    """The codec's table: numbers passed to kernels as arguments, so new ones need no compilation.

    A codec has one table; encode and decode may both use it.
    """
    trace = active()
    numbers = tuple(ir.single(constant(x)) for x in _several(numbers, "table"))
    if trace.table and not ir.same_numbers(trace.table, numbers):
        raise mistake("table: a codec has one table of numbers")
    trace.table = numbers
    return [Value(record("param", attr=i)) for i in range(len(numbers))]


def lookup(numbers: Sequence[Value], code: Value) -> Value:
    """The table entry of each code; codes beyond the table give its last entry."""
    active().uses("map")
    given = [lift(x) for x in _several(numbers, "lookup")]
    given *= 2 if len(given) == 1 else 1  # one number per code, too
    nodes = [x.node for x in given]
    if len(nodes) < 3 or any(n.op not in ("const", "param") for n in nodes):
        return _choose(given, 0, code)
    first = apply("lt", code, 1.0)
    args = (first.node.args[0], *nodes)
    return Value(record("lookup", args), first.blocked, first.within)


def _several(numbers: object, operator: str) -> list[Any]:
    try:
        each: Iterator[Any] = iter(() if isinstance(numbers, Mapping | Set) else numbers)  # type: ignore[call-overload]
    except TypeError:  # also of an array without a dimension
        each = iter(())
    given = list(islice(each, MAX_TABLE + 1))
    if not 1 <= len(given) <= MAX_TABLE:
        found = "more" if given else repr(numbers)
        raise mistake(f"{operator}: takes a tuple of 1 to {MAX_TABLE} numbers, not {found}")
    return given


def _choose(numbers: list[Value], first: int, code: object) -> Value:
    if len(numbers) == 1:
        return numbers[0]
    half = (len(numbers) + 1) // 2
    below = _choose(numbers[:half], first, code)
    within = apply("lt", code, float(first + half))
    return where(within, below, _choose(numbers[half:], first + half, code))
