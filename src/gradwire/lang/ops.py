"""The operators of the codec language: what a codec's file imports.

| operator | gives |
| --- | --- |
| map(f, x, ...) | f of every element |
| reduce(min, x), reduce(max, x), reduce(sum, x) | one value a block, or one for the whole tensor |
| count(x), count(condition) | how many values a block or the tensor holds, or where it holds |
| random(), index() | uniform in [0, 1) for every element; its position |
| filter(condition, capacity) | a selection: the elements where the condition holds |
| topk(key, k, among=condition) | a selection: the elements of the k largest keys |
| gather(x, selection), scatter(x, selection) | from elements to entries, and back |
| sort(x, every=n)[k] | the k-th largest of all values, or of a sample |
| rotate(x) | randomised Hadamard transform of every block (or of the whole tensor) |
| decomp(m, rank), matmul(a, b) | low-rank factors of matrix(x, columns), and their product |
| concat(name=value, ...) | the payload: its fields in wire order |
| uint(bits, v), trit(v), int32(v) | v as it will be stored, as whole numbers |
| bf16(v), fp16(v), fp32(v), native(v) | v as it will be stored |
| keep(codes, flag) | codes that are stored only for blocks whose flag is set |
| table(numbers), lookup(table, code) | numbers that may change without compiling again |
| where, clamp, floor, sqrt, inverse, isfinite, abs, share | arithmetic on symbols; a size |

`decode` receives the fields by name, which is the operator that CompLL calls extract.
`map`, `filter`, `reduce` and `abs` shadow Python's on purpose: in a codec's file they mean these.
"""

from __future__ import annotations

import builtins
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.lang import ir, shapes
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
    shapes.none(value.node, "reduce", location)
    if value.node.dtype == "bool":
        raise LanguageError(location, "reduce: a condition has no sum: use count(c)")
    return _reduce(name, as_number(value.node), value.blocked, location)


def _reduce(kind: str, node: ir.Node, blocked: bool, location: str) -> Value:
    if node.scope is ir.Scope.ELEMENT:
        node = ir.node("reduce", (node,), kind, scope=ir.Scope.BLOCK, location=location)
        if blocked:
            return Value(node, blocked=True)
    if node.scope is not ir.Scope.BLOCK:
        raise LanguageError(location, "reduce: there is one value only, nothing to reduce")
    # a tensor's reduction runs over its blocks' reductions, so it splits over threads exactly
    kind = "sum" if kind == "count" else kind
    return Value(ir.node("reduce", (node,), kind, scope=ir.Scope.TENSOR, location=location))


def count(value: Value) -> Value:
    """How many values a block (the last may be shorter) or the tensor holds; of a condition, how
    many times it holds."""
    location = here()
    active().uses("reduce")
    shapes.none(value.node, "count", location)
    if value.node.dtype == "bool":
        return _reduce("count", value.node, value.blocked, location)
    one = ir.node("const", attr=1.0, scope=ir.Scope.ELEMENT, location=location)
    return _reduce("sum", one, value.blocked, location)


def random(scope: str = "element", shared: str | None = None) -> Value:
    """Uniform in [0, 1) in steps of 2^-24: one an element, or one a block (`scope="block"`).

    Every call draws anew. With `shared=NAME` all ranks draw the same numbers, in encode as in
    decode, and whatever is encoded: the contributions to a sum and the sum.
    """
    trace = active()
    if scope not in _SCOPES:
        raise LanguageError(here(), f"random: scope is 'element' or 'block', not {scope!r}")
    if shared is not None and not isinstance(shared, str):
        raise LanguageError(here(), f"random: shared is a name, not {shared!r}")
    trace.uses("random")
    node = ir.node("random", attr=_stream(shared), scope=_SCOPES[scope], location=here())
    return Value(node)


def _stream(shared: str | None = None) -> ir.Stream:
    if shared is not None:  # numbers that do not depend on the order of calls
        return ir.Stream(2**16 + zlib.crc32(shared.encode()) % 2**16, shared=True)
    trace = active()
    trace.streams += 1
    return ir.Stream(trace.streams - 1)


def index(of: str = "parameter") -> Value:
    """The element's position in its parameter, modulo 2^32, or (`of="block"`) in its block.

    Arithmetic is fp32, so beyond 2^24 only the latter is exact.
    """
    if of not in ("parameter", "block"):
        raise LanguageError(here(), f"index: of is 'parameter' or 'block', not {of!r}")
    active().uses("index")
    attr = "block" if of == "block" else None
    return Value(
        ir.node("index", (), attr, dtype="uint32", scope=ir.Scope.ELEMENT, location=here())
    )


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
    stored = node.op in ("cast", "field", "select", "keep", "decompose")
    return stored and node.dtype in ir.STORABLE


def _cast(value: object, dtype: str, rounding: str) -> Value:
    location = here()
    value = lift(value)
    if value.node.dtype == "bool":
        raise LanguageError(location, f"{dtype}: a condition is no number: use where(c, 1, 0)")
    if value.node.dtype == "selection":
        raise LanguageError(location, f"{dtype}: a selection is no number: gather(x, selection)")
    scope = max(value.node.scope, ir.Scope.TENSOR)
    node = as_number(value.node)
    cast = ir.node("cast", (node,), rounding, dtype=dtype, scope=scope, location=location)
    return Value(cast, value.blocked)


def uint(bits: int, value: object) -> Value:
    """An unsigned integer of 1 to 8 bits: rounded toward zero, clamped; NaN gives 0."""
    if type(bits) is not int or not 1 <= bits <= 8:
        raise LanguageError(here(), f"uint: takes 1 to 8 bits, not {bits!r}")
    if isinstance(value, Value) and value.node.dtype == "bool":
        value = where(value, 1, 0)
    return _cast(value, f"uint{bits}", "zero")


def int32(value: object) -> Value:
    """A whole number of 32 bits: rounded toward zero, clamped; NaN gives 0."""
    return _cast(value, "int32", "zero")


def trit(value: object) -> Value:
    """An integer of 0, 1 or 2, five in a byte: rounded toward zero, clamped; NaN gives 0."""
    return _cast(value, "trit", "zero")


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


# selections ------------------------------------------------------------------------------------


def share(fraction: float, least: int = 1) -> ir.Size:
    """A size: floor(fraction * n) of n values, but at least `least` and at most n."""
    known = isinstance(fraction, (int, float)) and type(least) is int
    if not known or not 0.0 <= fraction <= 1.0 or least < 0:
        raise LanguageError(
            here(), f"share({fraction!r}, {least!r}): a fraction of 0 to 1, and a whole number"
        )
    return ir.Size(float(fraction), least)


def topk(key: Value, k: ir.Size, among: Value | None = None) -> Value:
    """The elements of the `k` largest keys; of equal keys, the first. NaN is the largest.

    Args:
        k: `share(density)`.
        among: only elements where this condition holds.
    """
    location = here()
    active().uses("topk")
    args = (_elements(key, "topk", location), *_conditions(among, location))
    return _select(args, k, location)


def filter(condition: Value, capacity: ir.Size) -> Value:
    """The elements where `condition` holds: the first `capacity` of them."""
    location = here()
    active().uses("filter")
    return _select(_conditions(condition, location), capacity, location)


def _select(args: tuple[ir.Node, ...], capacity: ir.Size, location: str) -> Value:
    if not isinstance(capacity, ir.Size):
        raise LanguageError(location, f"a selection's size is share(...), not {capacity!r}")
    return Value(
        ir.node(
            "select", args, capacity, dtype="selection", scope=ir.Scope.SELECTION,
            location=location,
        )
    )  # fmt: skip


def _conditions(condition: Value | None, location: str) -> tuple[ir.Node, ...]:
    if condition is None:
        return ()
    node = lift(condition).node
    if node.dtype != "bool" or node.scope is not ir.Scope.ELEMENT:
        raise LanguageError(location, "a selection needs a condition on elements")
    return (node,)


def _elements(value: Value, operator: str, location: str) -> ir.Node:
    node = as_number(lift(value).node)
    if node.scope is not ir.Scope.ELEMENT or node.dtype == "bool":
        found = "conditions" if node.dtype == "bool" else f"{node.scope.name.lower()} scope"
        raise LanguageError(location, f"{operator}: takes numbers of elements, not {found}")
    return node


def _selection(value: Value, operator: str, location: str) -> ir.Node:
    node = lift(value).node
    if node.dtype != "selection":
        raise LanguageError(location, f"{operator}: takes a selection, not a {node.dtype}")
    return node


def gather(value: Value, selection: Value) -> Value:
    """`value` of every selected element: its entries."""
    location = here()
    active().uses("gather")
    chosen = _selection(selection, "gather", location)
    node = lift(value).node
    if node.dtype == "bool":
        node = where(value, 1, 0).node
    args = (_elements(Value(node), "gather", location), chosen)
    return Value(ir.node("gather", args, scope=ir.Scope.SELECTION, location=location))


def scatter(value: Value, selection: Value) -> Value:
    """Elements: `value` where an element is selected, else 0. It ends a decode."""
    location = here()
    active().uses("scatter")
    chosen = _selection(selection, "scatter", location)
    node = as_number(lift(value).node)
    if node.scope not in (ir.Scope.SELECTION, ir.Scope.TENSOR, ir.Scope.CONSTANT):
        raise LanguageError(location, "scatter: takes entries, not elements")
    return Value(ir.node("scatter", (node, chosen), scope=ir.Scope.ELEMENT, location=location))


def keep(codes: Value, flag: Value) -> Value:
    """Codes that are stored only for blocks where `flag`, itself a uint(1) field, is set.

    The others decode as code 0.
    """
    location = here()
    active().uses("filter")
    stored = codes.node.dtype in ir.CODES and codes.node.scope is ir.Scope.ELEMENT
    if not stored or (flag.node.dtype, flag.node.scope) != ("uint1", ir.Scope.BLOCK):
        raise LanguageError(location, "keep: takes codes of elements, and a uint(1) of blocks")
    args = (codes.node, flag.node)
    return Value(
        ir.node("keep", args, dtype=codes.node.dtype, scope=ir.Scope.ELEMENT, location=location)
    )


@dataclass(frozen=True)
class Sorted:
    """What `sort` returns: pick from it with [size]."""

    node: ir.Node
    every: int
    location: str

    def __getitem__(self, size: ir.Size) -> Value:
        if not isinstance(size, ir.Size):
            raise LanguageError(self.location, f"sort(x)[k]: k is share(...), not {size!r}")
        if size.least < 1:
            raise LanguageError(self.location, "sort(x)[k]: k must be at least 1")
        rank = ir.Rank(self.every, size, _stream())
        return Value(
            ir.node("reduce", (self.node,), rank, scope=ir.Scope.TENSOR, location=self.location)
        )


def sort(value: Value, every: int = 1) -> Sorted:
    """All values of the tensor in descending order; only what is picked from them is computed.

    Args:
        every: sort a sample instead, one value of every `every`, its place drawn at random. Sizes
            are shares of the sample then.
    """
    location = here()
    active().uses("sort")
    if not isinstance(every, int) or every < 1:
        raise LanguageError(location, f"sort: every={every!r} must be 1 or more")
    return Sorted(_elements(value, "sort", location), every, location)


# transforms ------------------------------------------------------------------------------------


def rotate(value: Value, inverse: bool = False, full: bool = False) -> Value:
    """Randomised Hadamard transform; its signs are drawn alike by all ranks.

    Args:
        inverse: undo it.
        full: over the whole tensor rather than every block. That is not fused: see docs.
    """
    location = here()
    active().uses("rotate")
    rotation = ir.Rotation(_stream("rotate"), inverse, full)
    node = _elements(value, "rotate", location)
    return Value(
        ir.node("rotate", (node,), rotation, scope=ir.Scope.ELEMENT, location=location),
        blocked=value.blocked,
    )


def matrix(value: Value, columns: int) -> Value:
    """The elements as a matrix of `columns` columns, its last row filled up with zeros."""
    location = here()
    if type(columns) is not int or columns < 1:
        raise LanguageError(location, f"matrix: columns={columns!r} must be 1 or more")
    node, shape = _elements(value, "matrix", location), shapes.of_row(columns)
    return Value(ir.node("matrix", (node,), shape, scope=ir.Scope.MATRIX, location=location))


def decomp(value: Value, rank: int) -> tuple[Value, Value]:
    """P and Q of `rank` columns with P Q^T close to a matrix: one step of subspace iteration.

    Of matrix(x, columns), P is ceil(n / columns) x rank and Q columns x rank, of a row of n values.
    """
    location = here()
    active().uses("decomp")
    node = lift(value).node
    if node.op != "matrix":
        raise LanguageError(location, "decomp: takes matrix(x, columns)")
    if type(rank) is not int or rank < 1:
        raise LanguageError(location, f"decomp: rank={rank!r} must be 1 or more")
    shapes.factors(node, rank, location)
    stream = _stream("decomp")
    left, right = (
        ir.node("decompose", (node,), ir.Factor(rank, side, stream), location=location)
        for side in ("left", "right")
    )
    return Value(left), Value(right)


def matmul(a: Value, b: Value) -> Value:
    """A times B transposed, both matrices, and of as many columns: r x k and c x k give r x c."""
    location = here()
    active().uses("matmul")
    left, right = (as_number(shapes.matrix(lift(v).node, "matmul", location)) for v in (a, b))
    shapes.product(left, right, location)
    return Value(ir.node("product", (left, right), location=location))


def elements(value: Value) -> Value:
    """The elements of a matrix that is shaped as matrix(x, columns) was."""
    location = here()
    node = as_number(shapes.matrix(lift(value).node, "elements", location))
    shapes.flat(node, location)
    return Value(ir.node("flatten", (node,), scope=ir.Scope.ELEMENT, location=location))


# tables ----------------------------------------------------------------------------------------


def table(numbers: Sequence[float]) -> list[Value]:
    """The codec's table: numbers that are passed to kernels, so that changing them costs nothing.

    A codec has one table; encode and decode may both ask for it.
    """
    trace, location = active(), here()
    numbers = tuple(float(x) for x in numbers)
    if not 1 <= len(numbers) <= 256 or trace.table not in ((), numbers):
        raise LanguageError(location, "table: a codec has one table, of 1 to 256 numbers")
    trace.table = numbers
    return [Value(ir.node("param", attr=i)) for i in range(len(numbers))]


def lookup(numbers: Sequence[Value], code: Value) -> Value:
    """The number that each code stands for; codes beyond the table give its last number."""
    active().uses("map")
    return _lookup(list(numbers), 0, code)


def _lookup(numbers: list[Value], first: int, code: Value) -> Value:
    if len(numbers) == 1:
        return numbers[0]
    half = (len(numbers) + 1) // 2
    below = _lookup(numbers[:half], first, code)
    return where(code < first + half, below, _lookup(numbers[half:], first + half, code))
