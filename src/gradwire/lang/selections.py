"""Operators on selections: some elements of a row, and computations on these elements only.

Codecs import them from ops.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.lang import ir
from gradwire.lang.source import LanguageError, here
from gradwire.lang.trace import (
    Value,
    active,
    apply,
    as_number,
    constant,
    lift,
    numbers_of_elements,
    size,
    stream,
    whole,
)


def share(fraction: float, least: int = 1) -> ir.Size:
    """A size: floor(fraction * n) of n values, but at least `least` and at most n."""
    location = here()
    known = constant(fraction, location)
    if not 0.0 <= known <= 1.0:
        raise LanguageError(location, f"share: fraction={fraction!r} must be 0 to 1")
    return ir.Size(known + 0.0, size(least, 0, "share: least", location))  # 0.0 for -0.0


def topk(key: Value, k: ir.Size, among: Value | None = None) -> Value:
    """The elements of the `k` largest keys of the tensor; of equal keys, the first. NaN is the
    largest. Keys within blocks are refused; `among` may compare with numbers of blocks.

    Args:
        k: `share(density)`.
        among: select only elements that satisfy this condition.
    """
    location = here()
    active().uses("topk")
    key = whole(key, "topk", location)
    args = (numbers_of_elements(key, "topk", location), *_conditions(among, location))
    return _select(args, k, location)


def filter(condition: Value, capacity: ir.Size) -> Value:
    """The first `capacity` elements of the tensor that satisfy `condition`."""
    location = here()
    active().uses("filter")
    condition = whole(condition, "filter", location)
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


def _selection(value: Value, operator: str, location: str) -> ir.Node:
    node = lift(value).node
    if node.dtype != "selection":
        raise LanguageError(location, f"{operator}: takes a selection, not a {node.dtype}")
    return node


def gather(value: Value, selection: Value) -> Value:
    """The entries: `value` of every selected element."""
    location = here()
    active().uses("gather")
    chosen = _selection(selection, "gather", location)
    node = lift(value).node
    if node.dtype == "bool":
        node = apply("where", value, 1, 0).node
    args = (numbers_of_elements(Value(node), "gather", location), chosen)
    return Value(ir.node("gather", args, scope=ir.Scope.SELECTION, location=location))


def scatter(value: Value, selection: Value) -> Value:
    """Elements: `value` where an element is selected, else 0. Must be the last step of decode."""
    location = here()
    active().uses("scatter")
    chosen = _selection(selection, "scatter", location)
    node = as_number(lift(value).node)
    if node.scope not in (ir.Scope.SELECTION, ir.Scope.TENSOR, ir.Scope.CONSTANT):
        raise LanguageError(location, "scatter: takes entries, not elements")
    return Value(ir.node("scatter", (node, chosen), scope=ir.Scope.ELEMENT, location=location))


def keep(codes: Value, flag: Value) -> Value:
    """Codes that are stored only for blocks whose `flag`, a uint(1) field, is set.

    The other blocks decode as code 0.
    """
    location = here()
    active().uses("filter")
    codes, flag = lift(codes), lift(flag)
    stored = codes.node.dtype in ir.CODES and codes.node.scope is ir.Scope.ELEMENT
    if not stored or (flag.node.dtype, flag.node.scope) != ("uint1", ir.Scope.BLOCK):
        raise LanguageError(location, "keep: takes codes of elements, and a uint(1) of blocks")
    args = (codes.node, flag.node)
    return Value(
        ir.node("keep", args, dtype=codes.node.dtype, scope=ir.Scope.ELEMENT, location=location)
    )


@dataclass(frozen=True)
class Sorted:
    """The result of `sort`; sorted[size] is one of its values."""

    node: ir.Node
    every: int
    location: str

    def __getitem__(self, k: ir.Size) -> Value:
        if not isinstance(k, ir.Size):
            raise LanguageError(self.location, f"sort(x)[k]: k is share(...), not {k!r}")
        if k.least < 1:
            raise LanguageError(self.location, "sort(x)[k]: k must be at least 1")
        rank = ir.Rank(self.every, k, stream())
        return Value(
            ir.node("reduce", (self.node,), rank, scope=ir.Scope.TENSOR, location=self.location)
        )


def sort(value: Value, every: int = 1) -> Sorted:
    """All values of the tensor in descending order; only the values read by [size] are computed.

    Args:
        every: sort a sample: one random value of every `every` consecutive values. Sizes are then
            fractions of the sample.
    """
    location = here()
    active().uses("sort")
    window = size(every, 1, "sort: every", location)
    value = whole(value, "sort", location)
    return Sorted(numbers_of_elements(value, "sort", location), window, location)
