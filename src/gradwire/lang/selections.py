"""Operators on selections: some elements of a row, and computations on these elements only.

Codecs import them from ops.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.lang import ir
from gradwire.lang.source import mistake
from gradwire.lang.trace import (
    Value,
    active,
    apply,
    as_number,
    constant,
    lift,
    numbers_of_elements,
    record,
    size,
    stream,
    whole,
)


def share(fraction: float, least: int = 1) -> ir.Size:
    """A size: floor(fraction * n) of n values, but at least `least` and at most n."""
    known = constant(fraction)
    if not 0.0 <= known <= 1.0:
        raise mistake(f"share: fraction={fraction!r} must be 0 to 1")
    return ir.Size(known + 0.0, size(least, 0, "share: least"))  # 0.0 for -0.0


def topk(key: Value, k: ir.Size, among: Value | None = None) -> Value:
    """The elements of the `k` largest keys of the tensor; of equal keys, the first. NaN is the
    largest. Keys within blocks are refused; `among` may compare with numbers of blocks.

    Args:
        k: `share(density)`.
        among: select only elements that satisfy this condition.
    """
    active().uses("topk")
    key = whole(key, "topk")
    args = (numbers_of_elements(key, "topk"), *_conditions(among))
    return _select(args, k)


def filter(condition: Value, capacity: ir.Size) -> Value:
    """The first `capacity` elements of the tensor that satisfy `condition`."""
    active().uses("filter")
    condition = whole(condition, "filter")
    return _select(_conditions(condition), capacity)


def _select(args: tuple[ir.Node, ...], capacity: ir.Size) -> Value:
    if not isinstance(capacity, ir.Size):
        raise mistake(f"a selection's size is share(...), not {capacity!r}")
    scope = ir.Scope.SELECTION
    return Value(record("select", args, capacity, dtype="selection", scope=scope))


def _conditions(condition: Value | None) -> tuple[ir.Node, ...]:
    if condition is None:
        return ()
    node = lift(condition).node
    if node.dtype != "bool" or node.scope is not ir.Scope.ELEMENT:
        raise mistake("a selection needs a condition on elements")
    return (node,)


def _selection(value: Value, operator: str) -> ir.Node:
    node = lift(value).node
    if node.dtype != "selection":
        raise mistake(f"{operator}: takes a selection, not a {node.dtype}")
    return node


def gather(value: Value, selection: Value) -> Value:
    """The entries: `value` of every selected element."""
    active().uses("gather")
    chosen = _selection(selection, "gather")
    node = lift(value).node
    if node.dtype == "bool":
        node = apply("where", value, 1, 0).node
    args = (numbers_of_elements(Value(node), "gather"), chosen)
    return Value(record("gather", args, scope=ir.Scope.SELECTION))


def scatter(value: Value, selection: Value) -> Value:
    """Elements: `value` where an element is selected, else 0. Must be the last step of decode."""
    active().uses("scatter")
    chosen = _selection(selection, "scatter")
    node = as_number(lift(value).node)
    if node.scope not in (ir.Scope.SELECTION, ir.Scope.TENSOR, ir.Scope.CONSTANT):
        raise mistake("scatter: takes entries, not elements")
    return Value(record("scatter", (node, chosen), scope=ir.Scope.ELEMENT))


def keep(codes: Value, flag: Value) -> Value:
    """Codes that are stored only for blocks whose `flag`, a uint(1) field, is set.

    The other blocks decode as code 0.
    """
    active().uses("filter")
    codes, flag = lift(codes), lift(flag)
    stored = codes.node.dtype in ir.CODES and codes.node.scope is ir.Scope.ELEMENT
    if not stored or (flag.node.dtype, flag.node.scope) != ("uint1", ir.Scope.BLOCK):
        raise mistake("keep: takes codes of elements, and a uint(1) of blocks")
    args = (codes.node, flag.node)
    return Value(record("keep", args, dtype=codes.node.dtype, scope=ir.Scope.ELEMENT))


@dataclass(frozen=True)
class Sorted:
    """The result of `sort`; sorted[size] is one of its values."""

    node: ir.Node
    every: int

    def __getitem__(self, k: ir.Size) -> Value:
        if not isinstance(k, ir.Size):
            raise mistake(f"sort(x)[k]: k is share(...), not {k!r}")
        if k.least < 1:
            raise mistake("sort(x)[k]: k must be at least 1")
        rank = ir.Rank(self.every, k, stream())
        return Value(record("reduce", (self.node,), rank, scope=ir.Scope.TENSOR))


def sort(value: Value, every: int = 1) -> Sorted:
    """All values of the tensor in descending order; only the values read by [size] are computed.

    Args:
        every: sort a sample: one random value of every `every` consecutive values. Sizes are then
            fractions of the sample.
    """
    active().uses("sort")
    window = size(every, 1, "sort: every")
    value = whole(value, "sort")
    return Sorted(numbers_of_elements(value, "sort"), window)
